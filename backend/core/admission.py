"""Admission: which waiting request may join the running ones, and whether the pool has room for it.

A request that can fork from another sample of its prompt once that one has computed it lets others go first meanwhile.

`ContinuousBatching` fills a slot as soon as it is free (iteration-level scheduling, Yu et al. 2022, Orca). `StaticBatching`
is what servers did before: a batch runs until its longest member has ended, and nobody joins it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from backend.core.block_pool import NULL_BLOCK
from backend.core.kv_blocks import ComputedBlocks
from backend.core.kv_cache_manager import KVCacheManager
from backend.request import Request


class Batching(Protocol):
    def next_request(self, waiting: Iterable[Request], manager: KVCacheManager, max_num_seqs: int) -> Request | None:
        """The request to be admitted next, if it can be. None: nobody may join now.

        Args:
            waiting: in the order in which they are to be admitted, at least one.
            manager: the pool; asked how many fit it.
            max_num_seqs: most requests that run at once.
        """
        ...


class ContinuousBatching:
    def next_request(self, waiting: Iterable[Request], manager: KVCacheManager, max_num_seqs: int) -> Request | None:
        return next((request for request in waiting if not request.awaits_sample), None)


class StaticBatching:
    """The batch is chosen when everyone of the one before has ended: the first that wait then, as many as the pool holds.

    Each counts with all its blocks, also those that the prefix cache has. A member that is preempted stays one.
    """

    def __init__(self) -> None:
        self._members: dict[Request, None] = {}

    def next_request(self, waiting: Iterable[Request], manager: KVCacheManager, max_num_seqs: int) -> Request | None:
        # Backwards: as long as members are left to be admitted, they are the last ones.
        if not any(member.status in ("waiting", "preempted", "swapped") for member in reversed(self._members)):
            if any(member.status == "running" for member in self._members):
                return None
            self._members = _first_that_fit(waiting, manager, max_num_seqs)
        return next((request for request in waiting if request in self._members and not request.awaits_sample), None)


def _first_that_fit(waiting: Iterable[Request], manager: KVCacheManager, max_num_seqs: int) -> dict[Request, None]:
    room = manager.pool.num_blocks
    members: dict[Request, None] = {}
    for request in waiting:
        room -= manager.blocks_needed(request.num_tokens)
        if room < 0 or len(members) == max_num_seqs:
            break
        members[request] = None
    return members


def fits(manager: KVCacheManager, request: Request, computed: ComputedBlocks, owed: int) -> bool:
    """Whether the pool holds a waiting request beside the `owed` blocks; what it shares with others is there."""
    room = manager.pool.num_free_blocks + manager.pool.num_evictable_blocks
    kept, windows = _kept_blocks(manager, computed), manager.windows
    needed = manager.blocks_needed(request.num_tokens) - sum(kept)
    if windows.slides:
        # What it shares it gives back on its way, for blocks of its own.
        num_blocks = -(-request.num_tokens // manager.block_size)
        parts = zip(windows.behind(computed.num_tokens), kept, windows.limits, strict=True)
        needed = sum(min(num_blocks - num_behind - num_kept, limit) for num_behind, num_kept, limit in parts)
    return owed + needed <= room


def missing_blocks(manager: KVCacheManager, request: Request) -> int:
    """The most blocks that a running request takes beside those it holds, for the tokens it has and those on their way."""
    num_tokens = len(request.token_ids) + request.num_placeholder_tokens
    if num_tokens <= request.num_slots:
        return 0
    if not manager.windows.slides:
        return manager.blocks_needed(num_tokens) - manager.num_blocks_of(request)
    num_blocks = -(-num_tokens // manager.block_size)
    return sum(
        min(num_blocks - len(blocks), limit - len(blocks) + blocks.count(NULL_BLOCK))
        for blocks, limit in zip(manager.block_ids_of(request), manager.windows.limits, strict=True)
    )


def _kept_blocks(manager: KVCacheManager, computed: ComputedBlocks) -> list[int]:
    """Blocks of each KV group that somebody holds and that a request which begins with them need not take or copy."""
    num_full = computed.num_tokens // manager.block_size
    kept = [sum(manager.pool.ref_cnt(block) > 0 for block in blocks[:num_full]) for blocks in computed.block_ids]
    if computed.origin == "held":
        kept = [count + len(blocks) - num_full for count, blocks in zip(kept, computed.block_ids, strict=True)]
        for group, _ in manager.shared_from(num_full, computed.block_ids):
            kept[group] -= 1
    return kept
