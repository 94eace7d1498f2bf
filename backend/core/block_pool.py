"""`BlockPool`: which physical KV blocks are in use, and by how many."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

NULL_BLOCK = 0  # pads block tables and stands for positions that hold nothing; never allocated


class BlockPool:
    """`num_blocks` usable blocks with ids 1..num_blocks.

    Freed blocks go to the back of the queue, so that the one idle longest is taken first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._ref_cnt = [0] * (num_blocks + 1)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_evictable_blocks(self) -> int:
        """Cached but unreferenced blocks: none while nothing is cached beyond its request."""
        return 0

    @property
    def num_referenced_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks - self.num_evictable_blocks

    def ref_cnt(self, block_id: int) -> int:
        return self._ref_cnt[block_id]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take so many blocks with one reference each, or None, changing nothing, when there are fewer."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(num_blocks)]
        for block_id in taken:
            self._ref_cnt[block_id] = 1
        return taken

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
                free.append(block_id)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless every block is either free with no reference or referenced, and none is lost."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("a block is in the free queue twice")
        for block_id in range(1, self.num_blocks + 1):
            if (block_id in free) != (self._ref_cnt[block_id] == 0):
                raise RuntimeError(
                    f"block {block_id} has {self._ref_cnt[block_id]} references, free: {block_id in free}"
                )
        if self._ref_cnt[NULL_BLOCK] != 0 or NULL_BLOCK in free:
            raise RuntimeError("the null block was handed out")
