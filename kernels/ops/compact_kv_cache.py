"""Moving tokens between slots of the paged cache, in Triton: all layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor

BLOCK = 256  # of a slot's 16-bit words, which a program moves at a time


@triton.jit(do_not_specialize_on_alignment=["source_slots_ptr", "target_slots_ptr"])
def _compact_kv_cache_kernel(
    addresses_ptr,
    slot_words_ptr,
    source_slots_ptr,
    target_slots_ptr,
    stride_source_slots_row,
    stride_target_slots_row,
    NUM_MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One cache and one row of moves per program, one move after the other. Grid: (num_caches, num_rows)."""
    # int64, as everything that is multiplied by a slot's words: a pool passes 2^31 elements.
    cache_ptr = tl.load(addresses_ptr + tl.program_id(0)).to(tl.pointer_type(tl.int16))
    num_words = tl.load(slot_words_ptr + tl.program_id(0))
    row = tl.program_id(1).to(tl.int64)
    source_slots_ptr += row * stride_source_slots_row
    target_slots_ptr += row * stride_target_slots_row
    for begin in range(0, num_words, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        for move in tl.static_range(NUM_MOVES):  # pyright: ignore[reportGeneralTypeIssues]
            source = tl.load(source_slots_ptr + move)
            target = tl.load(target_slots_ptr + move)
            mask = word < tl.where(source == target, 0, num_words)
            moved = tl.load(cache_ptr + source * num_words + word, mask=mask)
            tl.store(cache_ptr + target * num_words + word, moved, mask=mask)
            tl.debug_barrier()  # a later move may write where this one has read


def cache_table(caches: Sequence[Tensor] | Tensor) -> Tensor:
    """Where caches lie and how many 16-bit words a slot of each has: int64 [2, num_caches] on their device.

    Raises:
        ValueError: a cache is not contiguous, has another device or block_size than the first, or a slot of it is no multiple of
            two bytes.
    """
    for index, cache in enumerate(caches):
        check_tensor(
            f"caches[{index}]", cache, (None, caches[0].shape[1], *cache.shape[2:]), cache.dtype, caches[0].device
        )
        if not cache.is_contiguous():
            raise ValueError(f"caches[{index}] has strides {list(cache.stride())}; expected it contiguous")
        if cache[0, 0].nbytes % 2:
            raise ValueError(f"a slot of caches[{index}] has {cache[0, 0].nbytes} bytes; a multiple of 2 is allowed")
    rows = [[cache.data_ptr() for cache in caches], [cache[0, 0].nbytes // 2 for cache in caches]]
    return torch.tensor(rows, dtype=torch.int64, device=caches[0].device)


def compact_kv_cache(
    caches: Sequence[Tensor] | Tensor, source_slots: Tensor, target_slots: Tensor, *, table: Tensor | None = None
) -> None:
    """Move what a row's source slots hold to its target slots, in every cache.

    `cache[t // block_size, t % block_size] = cache[s // block_size, s % block_size]` with `s = source_slots[r, i]` and
    `t = target_slots[r, i]`, for i in order. A slot may be a target and, before that or at once, a source: no target of a row is
    one of its later sources. Of a move that is none (padding, an accepted token that is in its place) both are the same slot.

    Args:
        caches: any dtype [num_blocks, block_size, ...] each, contiguous, one block_size for all; mutated. A sequence, or one
            tensor of them
        source_slots: int64 [num_rows, num_moves], strides (any, 1), block_id * block_size + offset
        target_slots: int64 [num_rows, num_moves], strides (any, 1); a slot is a target in one row at most, unless it stays what
            it is
        table: `cache_table(caches)`, if it is at hand: making it waits for the device, which a CUDA graph does not allow
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or as of `cache_table`. Slots are not read.
    """
    if not len(caches):
        return
    device = caches[0].device
    check_tensor("source_slots", source_slots, (None, None), torch.int64, device)
    num_rows, num_moves = source_slots.shape
    check_tensor("target_slots", target_slots, (num_rows, num_moves), torch.int64, device)
    if table is None:
        table = cache_table(caches)
    check_tensor("table", table, (2, len(caches)), torch.int64, device)
    if source_slots.numel() == 0:
        return
    addresses, slot_words = table
    _compact_kv_cache_kernel[(len(caches), num_rows)](
        addresses,
        slot_words,
        source_slots,
        target_slots,
        source_slots.stride(0),
        target_slots.stride(0),
        NUM_MOVES=num_moves,
        BLOCK=BLOCK,
    )
