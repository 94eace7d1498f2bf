"""What a window means for a request's blocks: which it need not hold any more, and how many it takes at most."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from backend.core.block_pool import NULL_BLOCK
from backend.request import NEVER


def blocks_behind(num_computed_tokens: int, window: int | None, block_size: int) -> int:
    """A request's leading blocks of which neither its next token nor any later one sees anything."""
    return 0 if window is None else max(0, num_computed_tokens - window + 1) // block_size


class KVWindows:
    """Args:
    windows: one per KV group, in tokens, the token at hand among them; None: the group keeps everything.
    max_num_batched_tokens: most tokens of a step.
    """

    def __init__(self, windows: Sequence[int | None], block_size: int, max_num_batched_tokens: int = NEVER) -> None:
        self._windows = tuple(windows)
        self._block_size = block_size
        self.slides = any(window is not None for window in windows)  # whether any group gives blocks back
        # Per group, blocks that a request never has more of: for a step's tokens and those that the first of them sees,
        # wherever in a block they begin, and for one token more, see `KVCacheManager.allocate_slots`.
        self.limits = tuple(
            NEVER if window is None else -(-(window - 1 + max_num_batched_tokens) // block_size) + 1
            for window in windows
        )

    def peak_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request holds on its way to so many tokens, over all groups."""
        num_blocks = -(-num_tokens // self._block_size)
        if not self.slides:
            return num_blocks * len(self.limits)
        return sum(min(num_blocks, limit) for limit in self.limits)

    def longest_request(self, num_blocks: int, limit: int) -> int:
        """Tokens of the longest request that a pool of so many blocks can hold, up to `limit`; 0 when it holds none."""
        return bisect_right(range(1, limit + 1), num_blocks, key=self.peak_blocks)

    def behind(self, num_computed_tokens: int) -> list[int]:
        """Leading blocks of each group that a request need not hold once it has computed so many tokens."""
        return [blocks_behind(num_computed_tokens, window, self._block_size) for window in self._windows]

    def within_reach(self, block_ids: Sequence[Sequence[int | None]], num_computed_tokens: int) -> list[list[int]]:
        """A request's tables with the null block in place of what lies behind a window; `block_ids` may have None there."""
        return [
            [NULL_BLOCK] * min(num_behind, len(blocks)) + [block_id for block_id in blocks[num_behind:] if block_id]
            for blocks, num_behind in zip(block_ids, self.behind(num_computed_tokens), strict=True)
        ]

    def longest_hit(self, found: Sequence[Sequence[int | None]]) -> int:
        """The most leading blocks with which a request can begin.

        A group without a window must have all of them, one with a window those that the first token behind them sees: the
        earlier ones may be gone. So a hit may be longer than one that fails.

        Args:
            found: per group, the block with the content of each of a request's leading blocks, equally many; None: none.
        """
        longest = len(found[0])
        for blocks, window in zip(found, self._windows, strict=True):
            if window is None:
                longest = next((index for index in range(longest) if blocks[index] is None), longest)
        if not self.slides:
            return longest
        hit, runs = 0, [0] * len(found)  # blocks in a row that are found, up to the one at hand
        for num_blocks in range(1, longest + 1):
            runs = [0 if blocks[num_blocks - 1] is None else run + 1 for blocks, run in zip(found, runs, strict=True)]
            behind = self.behind(num_blocks * self._block_size)
            if all(run + num_behind >= num_blocks for run, num_behind in zip(runs, behind, strict=True)):
                hit = num_blocks
        return hit
