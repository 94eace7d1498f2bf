"""Moving tokens between slots of the paged cache, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def compact_kv_cache(caches: Sequence[Tensor] | Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Move what a row's source slots hold to its target slots, in every cache.

    `cache[t // block_size, t % block_size] = cache[s // block_size, s % block_size]` with `s = source_slots[r, i]` and
    `t = target_slots[r, i]`, for i in order. A slot may be a target and, before that or at once, a source: no target of a row is
    one of its later sources. Of a move that is none (padding, an accepted token that is in its place) both are the same slot.

    Args:
        caches: any dtype [num_blocks, block_size, ...] each, contiguous, one block_size for all; mutated. A sequence, or one
            tensor of them
        source_slots: int64 [num_rows, num_moves], block_id * block_size + offset
        target_slots: int64 [num_rows, num_moves]; a slot is a target in one row at most, unless it stays what it is
    """
    block_size = caches[0].shape[1] if len(caches) else 1
    sources, targets = ((slots // block_size, slots % block_size) for slots in (source_slots, target_slots))
    for cache in caches:
        data = (
            cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
        )  # which `index_put_` does not know
        data.index_put_(targets, data[sources])
