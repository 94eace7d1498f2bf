"""Measures which tiles serve a linear layer best on this card: `python -m kernels.tune [--shape OP:ROWS:COLUMNS ...]`.

For every shape and number of tokens each candidate is timed, and so is the library's product together with the ops that
would then stand around it; the fastest goes into `kernels/tuned/<card>.json`, where the engine looks it up. Minutes on a
card, most of them spent compiling; nothing tunes by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import torch
from torch.nn import functional as F

from kernels.kernel_op import Inputs
from kernels.ops.projection import Tiles, fragment_tiles
from kernels.ops.rotary_and_store import rotary_and_store
from kernels.ops.silu_and_mul import silu_and_mul
from kernels.registry import REGISTRY
from kernels.timing import rotate, time_call
from kernels.tuning import FRAGMENT_TOKENS, TOKEN_BUCKETS, TUNED, LinearOp, Shape, is_small_shape

# The layers of Llama-3.1-8B and SmolLM2-135M: queries, keys and values; attention's output; gate and up; down; head. Then those
# of the draft heads that come for the latter: their output head, an EAGLE head's two, and Medusa's three.
DEFAULT_SHAPES = (
    Shape("norm_qkv_rotary_store", 6144, 4096),
    Shape("norm_linear", 4096, 4096),
    Shape("norm_gated_linear", 28672, 4096),
    Shape("norm_linear", 4096, 14336),
    Shape("norm_linear", 128256, 4096),
    Shape("norm_qkv_rotary_store", 960, 576),
    Shape("norm_linear", 576, 576),
    Shape("norm_gated_linear", 3072, 576),
    Shape("norm_linear", 576, 1536),
    Shape("norm_linear", 49152, 576),
    Shape("norm_linear", 16384, 576),
    Shape("norm_linear", 576, 1728),
    Shape("norm_linear", 576, 1152),
    Shape("norm_linear", 1536, 1152),
    Shape("norm_linear", 2304, 576),
)
# (block_n, block_k, num_warps, num_stages) by block_m.
CANDIDATES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    1: (
        (2, 512, 2, 2),
        (4, 512, 2, 2),
        (2, 1024, 4, 2),
        (4, 1024, 4, 2),
        (8, 512, 4, 2),
        (2, 2048, 8, 2),
        (4, 2048, 8, 2),
        (8, 1024, 8, 2),
    ),
    16: (
        (16, 128, 4, 8),
        (16, 256, 4, 4),
        (16, 256, 4, 6),
        (16, 512, 4, 3),
        (16, 512, 4, 4),
        (32, 64, 4, 8),
        (32, 128, 4, 6),
        (32, 256, 4, 4),
        (32, 256, 4, 5),
        (64, 64, 4, 8),
        (64, 128, 4, 6),
        (64, 128, 4, 5),
        (64, 128, 4, 8),
        (64, 256, 4, 4),
        (64, 256, 8, 4),
        (128, 64, 4, 5),
        (128, 128, 4, 4),
        (128, 128, 8, 4),
    ),
    32: (
        (16, 256, 4, 4),
        (32, 128, 4, 4),
        (32, 256, 4, 4),
        (64, 64, 4, 6),
        (64, 64, 4, 8),
        (64, 128, 4, 4),
        (64, 128, 4, 5),
        (64, 128, 8, 4),
        (128, 64, 4, 5),
        (128, 64, 8, 5),
        (128, 128, 8, 4),
    ),
    64: (
        (32, 128, 4, 4),
        (32, 256, 4, 3),
        (64, 64, 4, 6),
        (64, 128, 4, 4),
        (64, 128, 8, 4),
        (128, 64, 4, 5),
        (128, 64, 8, 5),
        (128, 128, 8, 3),
        (128, 128, 8, 4),
    ),
    128: (
        (64, 64, 4, 5),
        (128, 64, 8, 4),
        (128, 64, 8, 6),
        (128, 128, 8, 3),
    ),
    256: (
        (64, 64, 4, 4),
        (64, 64, 8, 5),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
    ),
}
MAX_FRAGMENT_TOKENS = 128
# (block_n, shares of the columns) of products in fragments.
FRAGMENT_CUTS = ((16, 2), (16, 4), (16, 8), (32, 2), (32, 4), (32, 8))
Timer = Callable[[Callable[..., Any], Inputs], float]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was found for a shape and a number of tokens."""

    shape: Shape
    num_tokens: int
    tiles: Tiles | None  # None: the library's product
    seconds: float
    library_seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.shape.op,
            "num_rows": self.shape.num_rows,
            "num_columns": self.shape.num_columns,
            "num_tokens": self.num_tokens,
            "tiles": None if self.tiles is None else list(self.tiles if self.tiles.fragments else self.tiles[:5]),
            "us": round(self.seconds * 1e6, 2),
            "library_us": round(self.library_seconds * 1e6, 2),
        }


def candidates(shape: Shape, num_tokens: int) -> list[Tiles]:
    """Tiles worth trying: as many tokens as fit one program, or half of that twice."""
    largest = next((size for size in CANDIDATES if size >= num_tokens), max(CANDIDATES))
    sizes = (1, 16) if num_tokens == 1 else (16,) if largest == 16 else (largest // 2, largest)
    tiles = [Tiles(block_m, *rest) for block_m in sizes for rest in CANDIDATES[block_m]]
    # Beyond 16 tokens further programs read the weight again, which a small one's time has room for.
    if num_tokens <= FRAGMENT_TOKENS[-1] or (num_tokens <= MAX_FRAGMENT_TOKENS and is_small_shape(shape)):
        cuts = [fragment_tiles(num_tokens, shape.num_columns, *cut) for cut in FRAGMENT_CUTS]
        tiles += [cut for cut in cuts if cut is not None]
    return tiles


def choose(shape: Shape, num_tokens: int, inputs: Inputs, timer: Timer) -> Choice:
    """Time every candidate and the library; a candidate that does not compile or fit is passed over."""
    library_seconds = timer(_library_call(shape), inputs)
    best, tiles = library_seconds, None
    for candidate in candidates(shape, num_tokens):
        try:
            seconds = timer(_fused_call(shape, candidate), inputs)
        except Exception as error:  # out of shared memory or registers, in whatever way this version of triton says so
            print(f"  {tuple(candidate)} does not run: {type(error).__name__}", file=sys.stderr)
            continue
        if seconds < best:
            best, tiles = seconds, candidate
    return Choice(shape, num_tokens, tiles, best, library_seconds)


def compile_ahead(shapes: Sequence[Shape], token_counts: Sequence[int], device: torch.device) -> None:
    """Fill the compiler's cache on disk by processes side by side: one alone would spend most of its time compiling."""
    jobs = []
    for shape in shapes:
        tiles = dict.fromkeys(chain.from_iterable(candidates(shape, count) for count in token_counts))
        jobs += [(shape, candidate, device) for candidate in tiles]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True), chunksize=4))


def _compile(shape: Shape, tiles: Tiles, device: torch.device) -> None:
    with suppress(Exception):  # one that does not run is named when it is timed
        _fused_call(shape, tiles)(**_cached_inputs(shape, tiles.block_m, device))


def tune(
    shapes: Sequence[Shape], token_counts: Sequence[int], device: torch.device, report: Callable[[Choice], None]
) -> list[Choice]:
    """Find the best tiles of each shape for each number of tokens, in bfloat16."""

    def timer(call: Callable[..., Any], inputs: Inputs) -> float:
        bytes_moved = inputs["weight"].nbytes
        return time_call(call, rotate(inputs, bytes_moved, device), device, capture=True).p50

    choices = []
    for shape in shapes:
        for num_tokens in token_counts:
            choice = choose(shape, num_tokens, _inputs(shape, num_tokens, device), timer)
            report(choice)
            choices.append(choice)
    return choices


def _inputs(shape: Shape, num_tokens: int, device: torch.device) -> Inputs:
    """The op's own inputs, without a norm to end or to begin, which cost the same whatever the tiles."""
    sizes: dict[str, Any] = {"num_tokens": num_tokens, "num_columns": shape.num_columns, "num_parts": 0, "bias": False}
    if shape.op == "norm_gated_linear":
        sizes["intermediate"] = shape.num_rows // 2
    elif shape.op == "norm_linear":
        sizes |= {"num_rows": shape.num_rows, "next_norm": False, "residual": not _is_head(shape)}
        sizes["out_dtype"] = torch.float32 if _is_head(shape) else None
    else:
        # Which rows are queries does not change the time: heads of one size, a third of them keys and values.
        head_dim = 128 if shape.num_rows % 128 == 0 else 64
        num_kv_heads = max(1, shape.num_rows // head_dim // 6)
        num_heads = shape.num_rows // head_dim - 2 * num_kv_heads
        sizes |= {"head_dim": head_dim, "num_kv_heads": num_kv_heads, "num_heads": num_heads, "num_blocks": 32}
    return REGISTRY[shape.op].make_inputs(torch.bfloat16, device, **sizes)


@lru_cache(maxsize=1)
def _cached_inputs(shape: Shape, num_tokens: int, device: torch.device) -> Inputs:
    return _inputs(shape, num_tokens, device)


def _is_head(shape: Shape) -> bool:
    """Whether the layer gives logits: no residual, and in fp32."""
    return shape.op == "norm_linear" and shape.num_rows >= 32768


def _fused_call(shape: Shape, tiles: Tiles) -> Callable[..., Any]:
    launch = REGISTRY[shape.op].launch
    return lambda **inputs: launch(**inputs, tiles=tiles)


def _library_call(shape: Shape) -> Callable[..., Any]:
    """The library's product and what stands around it in place of the fused op."""
    if shape.op == "norm_gated_linear":
        return lambda **inputs: silu_and_mul(F.linear(inputs["x"], inputs["weight"]))
    if _is_head(shape):
        return lambda **inputs: torch.mm(inputs["x"], inputs["weight"].t(), out_dtype=torch.float32)
    if shape.op == "norm_linear":
        return lambda **inputs: torch.addmm(inputs["residual"], inputs["x"], inputs["weight"].t())

    def qkv(**inputs: Any) -> Any:
        names = ("positions", "cos_sin_cache", "key_cache", "value_cache", "slot_mapping")
        _, _, num_kv_heads, head_dim = inputs["key_cache"].shape
        num_heads = inputs["weight"].shape[0] // head_dim - 2 * num_kv_heads
        product = F.linear(inputs["x"], inputs["weight"])
        return rotary_and_store(product, **{name: inputs[name] for name in names}, num_heads=num_heads)

    return qkv


def _shape(text: str) -> Shape:
    op, rows, columns = text.split(":")
    if op not in get_args(LinearOp):
        raise argparse.ArgumentTypeError(f"unknown op {op!r}; known are {', '.join(get_args(LinearOp))}")
    return Shape(op, int(rows), int(columns))  # type: ignore[arg-type]


def merge(path: Path, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """The rows of the table at `path`, if there is one, with `choices` in place of those they replace."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["op"], row["num_rows"], row["num_columns"], row["num_tokens"]

    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return list(
        ({key(row): row for row in rows} | {key(row): row for row in (it.to_json() for it in choices)}).values()
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.tune", description="Measure tiles on this card.")
    parser.add_argument("--shape", action="append", type=_shape, metavar="OP:ROWS:COLUMNS", help="repeatable")
    parser.add_argument("--tokens", action="append", type=int, choices=TOKEN_BUCKETS, help="repeatable; default: all")
    parser.add_argument(
        "-o", "--output", type=Path, help="default: kernels/tuned/<card>.json; other rows of it are kept"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; tiles are measured on the card they are for")
    device = torch.device("cuda")
    card = torch.cuda.get_device_name(device)
    shapes, token_counts = options.shape or DEFAULT_SHAPES, options.tokens or TOKEN_BUCKETS
    print(f"tuning on {card}", file=sys.stderr)
    compile_ahead(shapes, token_counts, device)
    choices = tune(shapes, token_counts, device, lambda choice: print(choice.to_json(), file=sys.stderr, flush=True))
    # The word of the card's name by which `load_table` finds it: "h100" of "NVIDIA H100 80GB HBM3".
    path = options.output or TUNED / f"{card.lower().removeprefix('nvidia ').split()[0]}.json"
    rows = ",\n".join(f"  {json.dumps(row)}" for row in merge(path, choices))
    path.write_text(
        f'{{"card": {json.dumps(card)}, "torch": "{torch.__version__}",\n "rows": [\n{rows}\n]}}\n', encoding="utf-8"
    )
    print(path)


if __name__ == "__main__":
    main()
