"""A uniform draw for each row's next output token, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor

BLOCK = 128


@triton.jit
def uniform(seed, position):
    """As `backend.sample.random.uniform` draws for the output token at a position: float64 in [0, 1)."""
    words = position.to(tl.uint64)
    low, high = (words & 0xFFFFFFFF).to(tl.uint32), (words >> 32).to(tl.uint32)
    nothing = (words * 0).to(tl.uint32)  # the purpose: a token
    first, second, _, _ = tl.philox(seed, low, high, nothing, nothing)
    bits = (first.to(tl.uint64) << 21) | (second.to(tl.uint64) >> 11)
    return bits.to(tl.int64).to(tl.float64) * (2.0**-53)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seeds_ptr", "positions_ptr"])
def _next_draws_kernel(draws_ptr, seeds_ptr, positions_ptr, num_rows, BLOCK: tl.constexpr):
    """BLOCK rows per program. Grid: (cdiv(num_rows, BLOCK),)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    seed = tl.load(seeds_ptr + row, mask=mask, other=0)
    position = tl.load(positions_ptr + row, mask=mask, other=0)
    tl.store(draws_ptr + row, uniform(seed, position), mask=mask)
    tl.store(positions_ptr + row, position + 1, mask=mask)


def next_draws(seeds: Tensor, positions: Tensor) -> Tensor:
    """What each row draws its token by, a function of seed and output position alone; its position grows by one.

    The draw is that of `backend.sample.random` for (seed, output position, token), to the bit: 53 bits of Philox4x32-10.

    Args:
        seeds: int64 [num_rows], stride (1,), the bits of an unsigned one
        positions: int64 [num_rows], stride (1,), of the output tokens; mutated
    Returns:
        float64 [num_rows] in [0, 1).
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    num_rows = seeds.numel()
    check_tensor("seeds", seeds, (num_rows,), torch.int64, seeds.device)
    check_tensor("positions", positions, (num_rows,), torch.int64, seeds.device)
    draws = torch.empty((num_rows,), dtype=torch.float64, device=seeds.device)
    if num_rows:
        _next_draws_kernel[(triton.cdiv(num_rows, BLOCK),)](draws, seeds, positions, num_rows, BLOCK=BLOCK)
    return draws
