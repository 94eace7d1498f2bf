"""Where a decode step's tokens stand, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor

BLOCK = 128


# A step's arrays lie end to end in one buffer: where each begins is not to make another kernel of it.
@triton.jit(
    do_not_specialize=["num_reqs", "stride_block_table_req"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "block_table_ptr"],
)
def _decode_positions_kernel(
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    block_table_ptr,
    num_reqs,
    stride_block_table_req,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK requests per program. Grid: (cdiv(num_reqs, BLOCK),)."""
    request = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = request < num_reqs
    seq_len = tl.load(seq_lens_ptr + request, mask=mask, other=0)
    position = tl.maximum(seq_len - 1, 0)
    block_ptrs = block_table_ptr + request * stride_block_table_req + position // BLOCK_SIZE
    block_id = tl.load(block_ptrs, mask=mask & (seq_len > 0), other=0).to(tl.int64)
    tl.store(positions_ptr + request, position.to(tl.int64), mask=mask)
    slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping_ptr + request, tl.where(seq_len > 0, slot, 0), mask=mask)


def decode_positions(seq_lens: Tensor, block_table: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Position and slot of the last token of each request.

    `position[r] = seq_lens[r] - 1` and `slot[r] = block_table[r, position // block_size] * block_size + position %
    block_size`; both are 0 for a padding row of length 0.

    Args:
        seq_lens: int32 [num_reqs], stride (1,)
        block_table: int32 [num_reqs, max_num_blocks], strides (any, 1)
        block_size: tokens per block
    Returns:
        positions int64 [num_reqs], slot_mapping int64 [num_reqs]; nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or block_size is below 1. Lengths are not read.
    """
    num_reqs = seq_lens.numel()
    check_tensor("seq_lens", seq_lens, (num_reqs,), torch.int32, seq_lens.device)
    check_tensor("block_table", block_table, (num_reqs, None), torch.int32, seq_lens.device)
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; allowed are 1 and more")
    positions = torch.empty((num_reqs,), dtype=torch.int64, device=seq_lens.device)
    slot_mapping = torch.empty((num_reqs,), dtype=torch.int64, device=seq_lens.device)
    if num_reqs:
        _decode_positions_kernel[(triton.cdiv(num_reqs, BLOCK),)](
            positions,
            slot_mapping,
            seq_lens,
            block_table,
            num_reqs,
            block_table.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK=BLOCK,
        )
    return positions, slot_mapping
