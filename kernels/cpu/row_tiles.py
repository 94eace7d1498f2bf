"""How a matrix lies for the kernels: 16 rows abreast, so that one vector holds a column of them."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 16  # rows


def to_row_tiles(matrix: Tensor) -> Tensor:
    """[rows, columns] -> [cdiv(rows, 16), columns, 16]; rows that the last tile lacks are 0."""
    rows, columns = matrix.shape
    padded = torch.zeros(-(-rows // TILE) * TILE, columns, dtype=matrix.dtype, device=matrix.device)
    padded[:rows] = matrix
    return padded.view(-1, TILE, columns).transpose(1, 2).contiguous()


def from_row_tiles(tiles: Tensor, rows: int) -> Tensor:
    """What `to_row_tiles` took."""
    return tiles.transpose(1, 2).reshape(-1, tiles.shape[1])[:rows]
