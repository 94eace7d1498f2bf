"""`SwapSpace`: which blocks of host memory hold the KV of which preempted request (`scheduler.preemption = swap`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from backend.core.block_hash import BlockHash
from backend.core.block_pool import NULL_BLOCK

NOTHING = -1  # in place of a host block, for what lies behind a window


@dataclass(slots=True)
class _Swapped:
    num_tokens: int
    host_ids: list[list[int]]  # in logical order, one list per KV group


class SwapSpace:
    """Host blocks with ids 0..num_blocks - 1. One that is known by its content is kept once, however many requests it serves.

    Args:
        num_blocks: of all KV groups together.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))  # in turn, so that a request's blocks mostly lie in a row
        self._ref_cnt = [0] * num_blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        self._swapped: dict[str, _Swapped] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_tokens_of(self, request_id: str) -> int:
        """Tokens whose KV is here; 0 for a request that has none."""
        swapped = self._swapped.get(request_id)
        return swapped.num_tokens if swapped else 0

    def put(
        self, request_id: str, num_tokens: int, block_ids: list[list[int]], hashes: list[list[BlockHash]]
    ) -> list[tuple[int, int]] | None:
        """Take host blocks for a request's KV; what is to be copied, as (block, host block).

        Returns None, changing nothing, when there are too few.

        Args:
            block_ids: that hold the tokens, one list per KV group; the null block is not copied.
            hashes: of the first ones of each group, as far as their content is known.
        """
        names = [
            (block_id, group_hashes[index] if index < len(group_hashes) else None)
            for blocks, group_hashes in zip(block_ids, hashes, strict=True)
            for index, block_id in enumerate(blocks)
            if block_id != NULL_BLOCK
        ]
        if sum(block_hash not in self._block_of for _, block_hash in names) > len(self._free):
            return None
        copies: list[tuple[int, int]] = []
        host_ids = iter([self._take(block_id, block_hash, copies) for block_id, block_hash in names])
        held = [[NOTHING if block_id == NULL_BLOCK else next(host_ids) for block_id in blocks] for blocks in block_ids]
        self._swapped[request_id] = _Swapped(num_tokens, held)
        return copies

    def take(self, request_id: str) -> list[list[int]]:
        """The host blocks of a request, in logical order, one list per KV group, or `NOTHING`. They are free from now on.

        The worker reads them before it writes to any of them: it carries out steps in order.
        """
        swapped = self._swapped.pop(request_id)
        self._release(host_id for blocks in swapped.host_ids for host_id in blocks)
        return swapped.host_ids

    def drop(self, request_id: str) -> None:
        """Forget a request; one that has nothing here is ignored."""
        if request_id in self._swapped:
            self.take(request_id)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless every host block is free or held, and by as many requests as it counts."""
        holders = [0] * self.num_blocks
        for swapped in self._swapped.values():
            for blocks in swapped.host_ids:
                for host_id in blocks:
                    if host_id != NOTHING:
                        holders[host_id] += 1
        if holders != self._ref_cnt:
            raise RuntimeError("host blocks and those who hold them do not belong together")
        if sorted(self._free) != [host_id for host_id, count in enumerate(holders) if not count]:
            raise RuntimeError("a host block is lost, or free and held")
        if {host_id: self._hash_of[host_id] for host_id in self._block_of.values()} != self._hash_of:
            raise RuntimeError("host blocks and hashes do not belong together")

    def _take(self, block_id: int, block_hash: BlockHash | None, copies: list[tuple[int, int]]) -> int:
        host_id = self._block_of.get(block_hash) if block_hash is not None else None
        if host_id is None:
            host_id = self._free.popleft()
            copies.append((block_id, host_id))
            if block_hash is not None:
                self._hash_of[host_id] = block_hash
                self._block_of[block_hash] = host_id
        self._ref_cnt[host_id] += 1
        return host_id

    def _release(self, host_ids: Iterable[int]) -> None:
        for host_id in host_ids:
            if host_id == NOTHING:
                continue
            self._ref_cnt[host_id] -= 1
            if not self._ref_cnt[host_id]:
                self._free.append(host_id)
                block_hash = self._hash_of.pop(host_id, None)
                if block_hash is not None:
                    del self._block_of[block_hash]
