"""What weights of codes are held against, a code at a time in float64, and the ways of storing them that are tried."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.reference.code_grid import CodeGrid

# Tokens, and of the codes: bits, columns, group size, origin. Every size of groups, one per row among them; some columns fill
# their last chunk of 128, and some are too few for it.
STORED: list[tuple[int, int, int, int, str]] = [
    (1, 4, 192, 32, "none"),
    (1, 4, 256, 128, "float"),
    (1, 8, 96, 96, "integer"),
    (5, 4, 320, 64, "integer"),
    (5, 4, 96, 96, "none"),
    (5, 8, 256, 128, "float"),
    (16, 4, 384, 128, "float"),
    (16, 4, 192, 32, "integer"),
    (16, 8, 320, 64, "none"),
]


def stored_code(words: list[int], column: int, bits: int) -> int:
    """Of the words of a chunk, and with 8 bits of each of its two planes, w holds columns 2 w and 2 w + 1."""
    chunk, inside = divmod(column, 128)
    place, pair = divmod(inside, 32)
    planes = [words[chunk * 4 * bits + 16 * plane + pair // 2] for plane in range(bits // 4)]
    halves = [word % 2**32 >> (4 * place + 16 * (pair % 2)) & 15 for word in planes]
    return sum(half << 4 * plane for plane, half in enumerate(halves))


def naive_matrix(words: Tensor, grid: CodeGrid, num_columns: int) -> Tensor:
    """float64 [num_rows, num_columns], on the words' device."""
    codes = [[stored_code(row, column, grid.bits) for column in range(num_columns)] for row in words.tolist()]
    group_size = num_columns // grid.scales.shape[1]

    def of_columns(numbers: Tensor) -> Tensor:
        return numbers.cpu().double().repeat_interleave(group_size, dim=1)

    matrix = torch.tensor(codes, dtype=torch.float64)
    if grid.zero_points is not None:
        matrix -= of_columns(grid.zero_points)
    elif grid.minimums is None:
        matrix -= 2 ** (grid.bits - 1)
    matrix *= of_columns(grid.scales)
    if grid.minimums is not None:
        matrix += of_columns(grid.minimums)
    return matrix.to(words.device)


def as_matrix(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of an op with its codes taken for the matrix they stand for."""
    matrix = naive_matrix(inputs["weight"], inputs["code_grid"], inputs["x"].shape[1])
    return inputs | {"weight": matrix, "code_grid": None}
