"""`BlockPool`: which physical KV blocks are in use, by how many, and which hold what somebody may want again."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from backend.core.block_hash import BlockHash

NULL_BLOCK = 0  # pads block tables and stands for positions that hold nothing; never allocated


class Taken(NamedTuple):
    block_ids: list[int]
    evicted: list[int]  # those of them that held something cached


class BlockPool:
    """`num_blocks` usable blocks with ids 1..num_blocks.

    A block is referenced, or free, or evictable: without a reference, but its content is known by a hash. Free blocks are
    taken before evictable ones; of both, the one idle longest first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._ref_cnt = [0] * (num_blocks + 1)
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Unreferenced blocks without cached content."""
        return len(self._free)

    @property
    def num_evictable_blocks(self) -> int:
        """Cached but unreferenced blocks."""
        return len(self._evictable)

    @property
    def num_referenced_blocks(self) -> int:
        return self.num_blocks - len(self._free) - len(self._evictable)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be found, referenced or not."""
        return len(self._hash_of)

    def cached_blocks(self) -> list[int]:
        return list(self._hash_of)

    def is_read_only(self, block_id: int) -> bool:
        """Whether a holder of the block may not write to it: others hold it as well, or can find it."""
        return self._ref_cnt[block_id] > 1 or block_id in self._hash_of

    def ref_cnt(self, block_id: int) -> int:
        return self._ref_cnt[block_id]

    def allocate(self, num_blocks: int) -> Taken | None:
        """Take so many blocks with one reference each, or None, changing nothing, when there are fewer."""
        free = self._free
        num_evicted = num_blocks - len(free)
        if num_evicted > len(self._evictable):
            return None
        taken = [free.popleft() for _ in range(min(num_blocks, len(free)))]
        evicted = [self._evict() for _ in range(num_evicted)] if num_evicted > 0 else []
        taken += evicted
        for block_id in taken:
            self._ref_cnt[block_id] = 1
        return Taken(taken, evicted)

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block. Raises `RuntimeError` for a block that has none."""
        ref_cnt, free = self._ref_cnt, self._free
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            count = ref_cnt[block_id] - 1
            if count < 0:
                raise RuntimeError(f"block {block_id} is freed twice")
            ref_cnt[block_id] = count
            if count == 0:
                if block_id in self._hash_of:
                    self._evictable[block_id] = None
                else:
                    free.append(block_id)

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The block with that content."""
        return self._block_of.get(block_hash)

    def share(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each of some blocks that are cached or held, the null block aside."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if self._ref_cnt[block_id] == 0:
                del self._evictable[block_id]
            self._ref_cnt[block_id] += 1

    def cache(self, block_id: int, block_hash: BlockHash) -> bool:
        """Let a referenced block be found by its content; False, changing nothing, where another one is already."""
        if block_hash in self._block_of:
            return False
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id
        return True

    def uncache(self, block_ids: Iterable[int]) -> list[int]:
        """Let blocks be found no more; those that could."""
        return [block_id for block_id in block_ids if self._forget(block_id)]

    def reset(self) -> int:
        """Let no block be found any more; how many could."""
        num_cached = len(self._hash_of)
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._hash_of.clear()
        self._block_of.clear()
        return num_cached

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless every block is free, evictable or referenced, in one way only, and none is lost."""
        free, evictable = set(self._free), set(self._evictable)
        if len(free) != len(self._free):
            raise RuntimeError("a block is in the free queue twice")
        if self._ref_cnt[NULL_BLOCK] != 0 or NULL_BLOCK in free | evictable | self._hash_of.keys():
            raise RuntimeError("the null block was handed out")
        if {block_id: self._hash_of[block_id] for block_id in self._block_of.values()} != self._hash_of:
            raise RuntimeError("blocks and hashes do not belong together")
        for block_id in range(1, self.num_blocks + 1):
            cached, places = block_id in self._hash_of, (block_id in free, block_id in evictable)
            expected = (False, False) if self._ref_cnt[block_id] else (not cached, cached)
            if places != expected:
                raise RuntimeError(
                    f"block {block_id} has {self._ref_cnt[block_id]} references, cached: {cached}, free: {places[0]}, "
                    f"evictable: {places[1]}"
                )

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        del self._block_of[self._hash_of.pop(block_id)]
        return block_id

    def _forget(self, block_id: int) -> bool:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is None:
            return False
        del self._block_of[block_hash]
        if block_id in self._evictable:
            del self._evictable[block_id]
            self._free.append(block_id)
        return True
