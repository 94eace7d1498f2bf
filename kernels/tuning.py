"""Which tiles a linear layer takes for so many tokens, or that the vendor's library serves it better: measured, kept as data.

`kernels/tuned/<card>.json` holds what `python -m kernels.tune` measured on a card. A card without a table takes the one of
its generation that exists; a shape without a row takes `default_choice`.

A row is an op, a weight's sizes, a number of tokens and the tiles, null for the library; then the times of both in microseconds,
`us` and `library_us`, for the reader alone. 41 rows of `h100.json` have none: Llama-3.1-8B's of one token, its head's of 256,
and all of SmolLM2-135M's. They are left of that table's first version, which kept no times and gave one choice to neighbouring
numbers of tokens; they count as any other until `kernels.tune` on an H100 replaces them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from kernels.ops.projection import SMALL_WEIGHT_BYTES, Tiles, default_tiles, fragment_tiles

TUNED = Path(__file__).parent / "tuned"
# Sizes that are measured: those of the decode graphs, but for the smallest.
TOKEN_BUCKETS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
FRAGMENT_TOKENS = range(2, 17)
LinearOp = Literal["norm_linear", "norm_gated_linear", "norm_qkv_rotary_store"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A linear layer: which op computes it, and its weight's sizes."""

    op: LinearOp
    num_rows: int
    num_columns: int


class TileTable:
    """`choose` gives the tiles for a layer and a number of tokens, or None where the library's product is faster.

    Args:
        fragments: whether a shape that was not measured may be multiplied in fragments: weights are of two bytes, and the card
            has a matrix unit that takes them from registers.
        name: of the file with the rows; None: there is none.
    """

    def __init__(
        self, rows: Mapping[tuple[Shape, int], Tiles | None], *, fragments: bool = False, name: str | None = None
    ) -> None:
        self.name = name
        self._fragments = fragments
        self._rows: dict[Shape, dict[int, Tiles | None]] = {}
        for shape, num_tokens in sorted(rows, key=lambda key: key[1]):
            self._rows.setdefault(shape, {})[num_tokens] = rows[shape, num_tokens]

    @classmethod
    def from_json(cls, text: str, *, fragments: bool = False, name: str | None = None) -> TileTable:
        rows = {}
        for row in json.loads(text)["rows"]:
            shape = Shape(row["op"], row["num_rows"], row["num_columns"])
            rows[shape, row["num_tokens"]] = None if row["tiles"] is None else Tiles(*row["tiles"])
        return cls(rows, fragments=fragments, name=name)

    def choose(self, shape: Shape, num_tokens: int) -> Tiles | None:
        """The row of the next larger number of tokens, of a shape that was measured at all."""
        measured = self._rows.get(shape)
        if measured is None:
            return default_choice(shape, num_tokens, fragments=self._fragments)
        return next((tiles for measured_at, tiles in measured.items() if measured_at >= num_tokens), None)


def is_small_shape(shape: Shape) -> bool:
    """Whether a weight of that shape, in two bytes, is a matter of latency rather than of bandwidth."""
    return 2 * shape.num_rows * shape.num_columns <= SMALL_WEIGHT_BYTES


def default_choice(shape: Shape, num_tokens: int, *, fragments: bool = False) -> Tiles | None:
    """A fair guess for a shape that nobody measured. `fragments`: see `TileTable`."""
    if fragments and num_tokens in FRAGMENT_TOKENS and is_small_shape(shape):
        tiles = fragment_tiles(num_tokens, shape.num_columns, 16, 4 if shape.num_columns <= 1536 else 8)
        if tiles is not None:
            return tiles
    return default_tiles(num_tokens, shape.num_rows, shape.num_columns) if num_tokens <= 32 else None


@lru_cache
def load_table(device: torch.device, dtype: torch.dtype) -> TileTable:
    """The table measured on this card, or else on another of its generation, or else an empty one.

    Tiles are measured on weights of two bytes; of four, they would not fit a multiprocessor's shared memory.
    """
    if device.type != "cuda" or dtype.itemsize != 2:
        return TileTable({})
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return TileTable({}, fragments=capability >= (8, 0))
    name = torch.cuda.get_device_name(device).lower()
    tables = {path.stem: path for path in sorted(TUNED.glob("*.json"))}
    path = next((path for stem, path in tables.items() if stem in name), tables.get("h100"))
    if path is None:
        return TileTable({}, fragments=True)
    return TileTable.from_json(path.read_text(encoding="utf-8"), fragments=True, name=path.stem)
