"""Where the tokens stand that are drafted behind a verified round, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor

BLOCK = 128


# A round's arrays lie end to end in one buffer: neither where each begins nor a size is to make another kernel of it.
@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "num_tokens",
        "max_model_len",
        "stride_block_tables_group",
        "stride_block_tables_req",
    ],
    do_not_specialize_on_alignment=["starts_ptr", "counts_ptr", "last_indices_ptr", "seq_lens_ptr", "block_tables_ptr"],
)
def _draft_positions_kernel(
    pass_seq_lens_ptr,
    positions_ptr,
    slot_mapping_ptr,
    starts_ptr,
    counts_ptr,
    last_indices_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    num_reqs,
    num_tokens,
    max_model_len,
    stride_block_tables_group,
    stride_block_tables_req,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK tokens, pass by pass, in one group's table per program. Grid: (cdiv(num_tokens, BLOCK), num_groups)."""
    group = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    request = token % num_reqs
    seq_len = tl.load(seq_lens_ptr + request, mask=mask, other=0)
    start = tl.load(starts_ptr + request, mask=mask, other=0)
    count = tl.load(counts_ptr + request, mask=mask, other=0)
    last_index = tl.load(last_indices_ptr + request, mask=mask, other=0)
    length = seq_len + last_index - start - count + token // num_reqs + 1
    length = tl.minimum(tl.maximum(length, 0), max_model_len)
    length = tl.where(seq_len > 0, length, 0)
    position = tl.maximum(length - 1, 0)
    table_ptr = block_tables_ptr + group * stride_block_tables_group
    block_ptrs = table_ptr + request.to(tl.int64) * stride_block_tables_req + position // BLOCK_SIZE
    block_id = tl.load(block_ptrs, mask=mask & (length > 0), other=0).to(tl.int64)
    slot = tl.where(length > 0, block_id * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    tl.store(slot_mapping_ptr + group * num_tokens + token, slot, mask=mask)
    if group == 0:  # they are the same for every group
        tl.store(pass_seq_lens_ptr + token, length.to(tl.int32), mask=mask)
        tl.store(positions_ptr + token, position, mask=mask)


def draft_positions(
    starts: Tensor,
    counts: Tensor,
    last_indices: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    num_passes: int,
    block_size: int,
    max_model_len: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Length, position and slots of a token for each pass and request, one behind the other from what was accepted on.

    `length[p, r] = seq_lens[r] - counts[r] + (last_indices[r] - starts[r]) + 1 + p`, within 0..max_model_len, and 0 for a
    padding row of length 0; `position = max(length - 1, 0)`, `slot[g, p, r] = block_tables[g, r, position // block_size] *
    block_size + position % block_size`, or 0 where the length is 0.

    Args:
        starts: int64 [num_reqs], stride (1,), each request's first token in the round
        counts: int64 [num_reqs], stride (1,), drafts that were verified
        last_indices: int64 [num_reqs], stride (1,), each request's last token that was not rejected
        seq_lens: int32 [num_reqs], stride (1,), with all drafts
        block_tables: int32 [num_groups, num_reqs, max_num_blocks], strides (any, any, 1)
        num_passes: tokens of each request
        block_size: tokens per block
        max_model_len: longest request, in tokens
    Returns:
        seq_lens int32 [num_passes, num_reqs], positions int64 [num_passes, num_reqs], slot_mappings int64 [num_groups,
        num_passes, num_reqs], all contiguous; nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, num_passes, block_size or num_groups is below 1, or
            the block tables end before max_model_len. Values are not read.
    """
    num_reqs = seq_lens.numel()
    check_tensor("seq_lens", seq_lens, (num_reqs,), torch.int32, seq_lens.device)
    for name, tensor in (("starts", starts), ("counts", counts), ("last_indices", last_indices)):
        check_tensor(name, tensor, (num_reqs,), torch.int64, seq_lens.device)
    check_tensor("block_tables", block_tables, (None, num_reqs, None), torch.int32, seq_lens.device)
    num_groups, _, max_num_blocks = block_tables.shape
    for name, value in (("num_passes", num_passes), ("block_size", block_size), ("num_groups", num_groups)):
        if value < 1:
            raise ValueError(f"{name} is {value}; allowed are 1 and more")
    if max_model_len > max_num_blocks * block_size:
        raise ValueError(
            f"max_model_len is {max_model_len}; block_tables hold {max_num_blocks * block_size} tokens of a request"
        )
    shape, device = (num_passes, num_reqs), seq_lens.device
    pass_seq_lens = torch.empty(shape, dtype=torch.int32, device=device)
    positions = torch.empty(shape, dtype=torch.int64, device=device)
    slot_mappings = torch.empty((num_groups, *shape), dtype=torch.int64, device=device)
    num_tokens = num_passes * num_reqs
    if num_tokens:
        _draft_positions_kernel[(triton.cdiv(num_tokens, BLOCK), num_groups)](
            pass_seq_lens,
            positions,
            slot_mappings,
            starts,
            counts,
            last_indices,
            seq_lens,
            block_tables,
            num_reqs,
            num_tokens,
            max_model_len,
            block_tables.stride(0),
            block_tables.stride(1),
            BLOCK_SIZE=block_size,
            BLOCK=BLOCK,
        )
    return pass_seq_lens, positions, slot_mappings
