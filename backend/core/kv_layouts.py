"""`cache.layout`: what a KV layout other than the paged one is, and what it cannot do.

- `contiguous`: room for `max_model_len` tokens in one piece, reserved at admission, as engines did before paged attention
  (Kwon et al. 2023, PagedAttention, section 3.1). Blocks, tables and kernels are those of the paged layout.
- `none`: no KV outlives its step, see `recompute_scheduler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from backend.config import EngineConfig
from backend.core.block_pool import BlockPool, Taken
from backend.core.kv_blocks import KVAllocation
from backend.core.kv_cache_manager import KVCacheManager
from backend.core.kv_groups import KVGroupSpec
from backend.request import Request


class ContiguousBlockPool(BlockPool):
    """Gives and takes back regions of `region_size` blocks with consecutive ids; what is left at the end is never used."""

    def __init__(self, num_blocks: int, region_size: int) -> None:
        super().__init__(num_blocks)
        self._num_left = num_blocks % region_size

    def allocate(self, num_blocks: int) -> Taken | None:
        # The queue holds whole regions, each in order, and somewhere between them those left at the end.
        if self._free and self._free[0] > self.num_blocks - self._num_left:
            self._free.rotate(-self._num_left)
        return super().allocate(num_blocks)

    def free(self, block_ids: Sequence[int]) -> None:
        super().free(sorted(block_ids))


class ContiguousKVCacheManager(KVCacheManager):
    """Reserves blocks for `max_model_len` tokens with a request's first ones. Nothing is shared.

    A piece stays whole: blocks behind a window are kept, and only attention heeds it. All reservations are equal, so the pool
    holds one more exactly when enough blocks are free.
    """

    shares_blocks = False

    def __init__(self, num_blocks: int, block_size: int, groups: Sequence[KVGroupSpec], max_model_len: int) -> None:
        super().__init__(num_blocks, block_size, [replace(group, window=None) for group in groups])
        self._max_model_len = max_model_len
        self.pool = ContiguousBlockPool(num_blocks, self.blocks_needed(max_model_len))

    def blocks_needed(self, num_tokens: int) -> int:
        return super().blocks_needed(self._max_model_len)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        kind: Literal["allocate", "swap_in"] = "allocate",
    ) -> KVAllocation | None:
        return super().allocate_slots(request, self._max_model_len - request.num_computed_tokens)

    def give_back_lookahead(self, request: Request, num_reached: int = 0) -> int | None:
        return None


def resolve_layout(resolved: EngineConfig) -> tuple[EngineConfig, tuple[str, ...]]:
    """Turn off and cut what the layout cannot do; a sentence for each. The config's other fields are resolved already."""
    layout = resolved.cache.layout
    overrides, notices = {}, []
    if layout != "paged" and resolved.cache.enable_prefix_caching:
        overrides["cache.enable_prefix_caching"] = False
        notices.append(f"cache.enable_prefix_caching is off: nothing is shared with cache.layout = {layout!r}.")
    if layout != "paged" and resolved.scheduler.preemption == "swap":
        overrides["scheduler.preemption"] = "recompute"
        notices.append(f"scheduler.preemption is 'recompute': nobody is preempted with cache.layout = {layout!r}.")
    if layout == "none":
        budget, length = resolved.scheduler.max_num_batched_tokens, resolved.model.max_model_len
        assert budget is not None
        assert length is not None
        if resolved.scheduler.async_scheduling:
            overrides["scheduler.async_scheduling"] = False
            notices.append(
                "scheduler.async_scheduling is off: with cache.layout = 'none' a step needs the ids of all tokens before it."
            )
        if length > budget + 1:  # the last token of a request is sampled and not run
            overrides["model.max_model_len"] = budget + 1
            notices.append(
                f"model.max_model_len is {budget + 1:,} tokens instead of {length:,}: with cache.layout = 'none' a step runs "
                f"whole requests, and scheduler.max_num_batched_tokens = {budget:,} holds no longer one."
            )
    return resolved.with_overrides(overrides), tuple(notices)


def length_limit(config: EngineConfig) -> str:
    """What decides the longest request, as a refusal names it."""
    if config.cache.layout == "none":
        return (
            "model.max_model_len, cut to what the KV cache holds and, without KV between steps, to one more than "
            f"scheduler.max_num_batched_tokens = {config.scheduler.max_num_batched_tokens:,}"
        )
    return "model.max_model_len, cut to what the KV cache holds"
