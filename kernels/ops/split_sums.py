"""Adding up what the programs of a split sum or softmax left, without a second kernel. No op: called from inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last(counter_ptr, num_programs):
    """Count this program at `counter_ptr`, its stores before; whether it is the last of `num_programs`. Counts from 0 again."""
    # All threads' stores come before the one thread's count.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if arrived == num_programs - 1:
        tl.store(counter_ptr, 0)
    return arrived == num_programs - 1


@triton.jit
def sum_splits(total, partial_ptr, counter_ptr, split, SPLITS: tl.constexpr):
    """`total` [rows, columns] of SPLITS programs, in their order, and whether this is the program that has it: the last one.

    Args:
        partial_ptr: room for SPLITS totals, of this program's tile alone; `split`: this program's place in it.
        counter_ptr: of this tile, see `is_last`.
    """
    SIZE: tl.constexpr = total.shape[0] * total.shape[1]
    place = tl.arange(0, total.shape[0])[:, None] * total.shape[1] + tl.arange(0, total.shape[1])[None, :]
    tl.store(partial_ptr + split * SIZE + place, total)
    owner = is_last(counter_ptr, SPLITS)
    if owner:
        total = tl.zeros_like(total)
        for part in range(SPLITS):
            # ".cg": straight from the L2, where the other programs' sums are.
            total += tl.load(partial_ptr + part * SIZE + place, cache_modifier=".cg")
    return total, owner


@triton.jit
def add_up(
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    first,
    stride,
    num_parts,
    member_mask,
    MAX_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge parts `first + i * stride`, i < num_parts, of each query head of a group, in order of i.

    Returns:
        maximum [BLOCK_G], weight [BLOCK_G] and unnormalised sum [BLOCK_G, BLOCK_D].
    """
    index = tl.arange(0, MAX_PARTS)
    part = first[:, None] + index[None, :] * stride
    mask = member_mask[:, None] & (index < num_parts)[None, :]
    # ".cg": straight from the L2, where the other programs' parts are.
    part_max = tl.load(partial_max_ptr + part, mask=mask, other=float("-inf"), cache_modifier=".cg")
    part_sum = tl.load(partial_sum_ptr + part, mask=mask, other=0.0, cache_modifier=".cg")
    total_max = tl.where(member_mask, tl.max(part_max, axis=1), 0.0)
    total_sum = tl.sum(part_sum * tl.exp2(part_max - total_max[:, None]), axis=1)
    total = tl.zeros([first.shape[0], BLOCK_D], dtype=tl.float32)
    for start in range(0, num_parts, CHUNK):
        in_chunk = start + tl.arange(0, CHUNK)
        chunk = first[:, None] + in_chunk[None, :] * stride
        chunk_mask = member_mask[:, None] & (in_chunk < num_parts)[None, :]
        chunk_max = tl.load(partial_max_ptr + chunk, mask=chunk_mask, other=float("-inf"), cache_modifier=".cg")
        sums_ptrs = partial_ptr + chunk[:, :, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, None, :]
        sums = tl.load(sums_ptrs, mask=chunk_mask[:, :, None], other=0.0, cache_modifier=".cg")
        total += tl.sum(sums * tl.exp2(chunk_max - total_max[:, None])[:, :, None], axis=1)
    return total_max, total_sum, total
