"""`KVCacheManager`: the blocks each request holds, hiding the pool from the scheduler."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from backend.core.block_pool import NULL_BLOCK, BlockPool
from backend.request import Request


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers whose KV has one shape and one lifetime. A block id addresses the same slot in each of them."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers of the group."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(slots=True)
class KVAllocation:
    """Blocks newly given to a request, one list per KV group, in logical order."""

    block_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class KVCacheSnapshot:
    """The pool at one moment. `block_ids` maps each request to its blocks, one list per KV group."""

    num_referenced_blocks: int
    num_evictable_blocks: int
    num_free_blocks: int
    block_ids: dict[str, list[list[int]]]


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, groups: list[KVGroupSpec]) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._num_groups = len(groups)
        self._block_ids: dict[str, list[list[int]]] = {}

    @property
    def usage(self) -> float:
        """Referenced / usable blocks, 0..1."""
        return self.pool.num_referenced_blocks / self.pool.num_blocks

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens of one request, over all groups."""
        return -(-num_tokens // self.block_size) * self._num_groups

    def num_blocks_of(self, request: Request) -> int:
        return sum(len(blocks) for blocks in self._block_ids.get(request.request_id, ()))

    def get_computed_blocks(self, request: Request) -> tuple[list[list[int]], int]:
        """Blocks whose content is already computed for this request's tokens, and how many tokens they hold.

        Nothing outlives its request yet, so there are never any.
        """
        return [[] for _ in range(self._num_groups)], 0

    def allocate_slots(
        self, request: Request, num_new_tokens: int, num_lookahead_tokens: int = 0
    ) -> KVAllocation | None:
        """Make room for `num_new_tokens` after the computed ones, and for draft tokens behind them.

        Returns None, changing nothing, when the pool cannot give the blocks.
        """
        num_tokens = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        held = self._block_ids.get(request.request_id) or [[] for _ in range(self._num_groups)]
        # All groups have the same number: a position behind a group's window still has its entry.
        missing = max(0, -(-num_tokens // self.block_size) - len(held[0]))
        taken = self.pool.allocate(missing * self._num_groups)
        if taken is None:
            return None
        new_block_ids = [taken[group * missing : (group + 1) * missing] for group in range(self._num_groups)]
        for blocks, more in zip(held, new_block_ids, strict=True):
            blocks.extend(more)
        self._block_ids[request.request_id] = held
        request.num_slots = len(held[0]) * self.block_size
        return KVAllocation(new_block_ids)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request; one that holds none is ignored."""
        request.num_slots = 0
        for blocks in self._block_ids.pop(request.request_id, ()):
            # Last block first, so that a prompt's beginning stays longest in the queue.
            self.pool.free(blocks[::-1])

    def snapshot(self) -> KVCacheSnapshot:
        return KVCacheSnapshot(
            num_referenced_blocks=self.pool.num_referenced_blocks,
            num_evictable_blocks=self.pool.num_evictable_blocks,
            num_free_blocks=self.pool.num_free_blocks,
            block_ids={key: [list(blocks) for blocks in groups] for key, groups in self._block_ids.items()},
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless free + cached + referenced == pool and every reference belongs to a request."""
        self.pool.check_integrity()
        held = Counter(
            block_id
            for groups in self._block_ids.values()
            for blocks in groups
            for block_id in blocks
            if block_id != NULL_BLOCK
        )
        for block_id in range(1, self.pool.num_blocks + 1):
            if held[block_id] != self.pool.ref_cnt(block_id):
                raise RuntimeError(
                    f"block {block_id} has {self.pool.ref_cnt(block_id)} references but {held[block_id]} holders"
                )
