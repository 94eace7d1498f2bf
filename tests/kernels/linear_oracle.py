"""What the linear ops are held against, in float64, and the cuts they are tried with."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from kernels.ops.projection import Tiles
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands, bfloat16_with

# One token per program, and a matrix unit's least; several programs of tokens and rows, and several steps over columns. Last
# in fragments: of shares that are longer than what is loaded of them at once, and of some that are empty.
TILES = [
    Tiles(1, 16, 64, 4, 2),
    Tiles(16, 16, 32, 4, 2),
    Tiles(32, 32, 64, 4, 2),
    Tiles(8, 16, 32, 2, 1, fragments=True),
    Tiles(16, 32, 64, 4, 1, fragments=True),
]
# Several programs of tokens, or one that is filled in part: few, since the interpreter runs them one after another.
SEVERAL_TOKENS = [(TILES[0], 3), (TILES[1], 17), (TILES[2], 17), (TILES[3], 9), (TILES[4], 17)]
# dtype, tiles, number of tokens.
EVERY_CUT = [
    *((dtype, *cut) for dtype in KERNEL_DTYPES[:2] for cut in [(TILES[0], 1), (TILES[1], 5), *SEVERAL_TOKENS]),
    *bfloat16_with(itertools.product(TILES, [1, 5, 17])),
]


def naive_project(inputs: dict[str, Any]) -> Tensor:
    """The product, each row divided by its norm's root mean square, and the bias; float64 [num_tokens, num_rows]."""
    x, weight, square_sums, bias = (inputs[name] for name in ("x", "weight", "square_sums", "bias"))
    product = x.double() @ weight.double().t()
    if square_sums is not None:
        mean_square = square_sums.double().sum(dim=1) / x.shape[1]
        product /= (mean_square + inputs["eps"]).sqrt()[:, None]
    return product if bias is None else product + bias.double()


def guarded(inputs: dict[str, Any]) -> tuple[dict[str, Any], GuardBands]:
    """Every float tensor between bands of NaN."""
    bands = GuardBands()
    wrapped = {
        name: bands.wrap(value) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    return wrapped, bands


def widened(tensor: Tensor) -> Tensor:
    """Equal to `tensor`, its rows the middle of longer ones whose other columns are NaN."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + 9), torch.nan, dtype=tensor.dtype, device=tensor.device)
    wide[:, 4:-5] = tensor
    return wide[:, 4:-5]
