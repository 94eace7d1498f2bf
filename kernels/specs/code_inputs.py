"""Weights of random codes, which several ops take."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.code_grid import CodeGrid
from kernels.reference.int_words import CHUNK


def make_codes(
    generator: torch.Generator, *, num_rows: int, num_columns: int, bits: int, group_size: int, origin: str
) -> tuple[Tensor, CodeGrid]:
    """Words of random bits, and what they stand for; products with x of spread 1 have a spread of about 1.

    Args:
        origin: "none", "integer" (zero points) or "float" (minimums).
    """
    device = generator.device
    num_groups = num_columns // group_size
    scale = 4 * 2.0**-bits * num_columns**-0.5

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, generator=generator)

    # A group's numbers of all rows side by side: the rows of a tile are loaded together.
    scales = ((0.5 + random(num_groups, num_rows)) * scale).half().t()
    num_words = -(-num_columns // CHUNK) * 4 * bits
    words = torch.randint(-(2**31), 2**31, (num_rows, num_words), device=device, generator=generator)
    zeros = (random(num_groups, num_rows) * 2**bits).to(torch.int16).t()
    zero_points = zeros if origin == "integer" else None
    minimums = (-scales.float() * zeros).half() if origin == "float" else None
    return words.to(torch.int32), CodeGrid(bits, scales, zero_points, minimums)
