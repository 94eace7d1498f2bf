"""`KVCacheManager`: the blocks each request holds, hiding the pool from the scheduler."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from backend.core.block_events import BlockEvent, BlockEventKind, PoolState
from backend.core.block_hash import BlockHash, extend_block_hashes
from backend.core.block_pool import NULL_BLOCK, BlockPool
from backend.request import NEVER, Request


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
    """Args:
    num_blocks: usable blocks, of all groups together.
    block_size: tokens per block.
    groups: KV shapes of the model.
    prefix_key: with one, full blocks whose tokens are computed can be found and shared by requests that begin alike, see
        `block_hash.prefix_key`; None: blocks do not outlive their request.
    """

    def __init__(
        self, num_blocks: int, block_size: int, groups: list[KVGroupSpec], prefix_key: BlockHash | None = None
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._num_groups = len(groups)
        self._block_ids: dict[str, list[list[int]]] = {}
        self._events: list[BlockEvent] | None = None
        # A chain for each group: the same tokens have other KV there.
        self._keys = [prefix_key + bytes([group]) for group in range(len(groups))] if prefix_key is not None else []

    @property
    def caches_prefixes(self) -> bool:
        return bool(self._keys)

    @property
    def usage(self) -> float:
        """Referenced / usable blocks, 0..1."""
        return self.pool.num_referenced_blocks / self.pool.num_blocks

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV can be found, of one group."""
        return self.pool.num_cached_blocks // self._num_groups * self.block_size

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens of one request, over all groups."""
        return -(-num_tokens // self.block_size) * self._num_groups

    def num_blocks_of(self, request: Request) -> int:
        return sum(len(blocks) for blocks in self._block_ids.get(request.request_id, ()))

    def get_computed_blocks(self, request: Request) -> tuple[list[list[int]], int]:
        """Cached blocks with the request's first tokens, one list per group, and how many tokens they hold.

        The last token is never among them: it has to run for the next one to be sampled.
        """
        num_blocks = (request.num_tokens - 1) // self.block_size if self._keys else 0
        self._hash(request, num_blocks)
        found: list[list[int]] = [[] for _ in range(self._num_groups)]
        for index in range(num_blocks):
            block_ids = [self.pool.lookup(hashes[index]) for hashes in request.block_hashes]
            if None in block_ids:
                break
            for blocks, block_id in zip(found, block_ids, strict=True):
                blocks.append(block_id)  # pyright: ignore[reportArgumentType]
        return found, len(found[0]) * self.block_size

    def take_computed_blocks(self, request: Request, block_ids: list[list[int]]) -> None:
        """Begin a request that holds nothing with the blocks that `get_computed_blocks` has just found."""
        for group, blocks in enumerate(block_ids):
            self.pool.share(blocks)
            self._log("share", blocks, request, group)
        self._block_ids[request.request_id] = [list(blocks) for blocks in block_ids]
        request.num_computed_tokens = request.num_slots = len(block_ids[0]) * self.block_size
        if self._keys:
            request.next_cache_at = request.num_slots + self.block_size

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
        self._log("evict", taken.evicted)
        new_block_ids = [taken.block_ids[group * missing : (group + 1) * missing] for group in range(self._num_groups)]
        for group, (blocks, more) in enumerate(zip(held, new_block_ids, strict=True)):
            blocks.extend(more)
            self._log("allocate", more, request, group)
        self._block_ids[request.request_id] = held
        request.num_slots = len(held[0]) * self.block_size
        return KVAllocation(new_block_ids)

    def cache_blocks(self, request: Request) -> None:
        """Let the request's full blocks be found, as far as their tokens are known and computed.

        A step that is on its way counts as computed: whoever finds a block runs in a later one.
        """
        num_blocks = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        first = request.next_cache_at // self.block_size - 1
        self._hash(request, num_blocks)
        held = self._block_ids[request.request_id]
        for blocks, hashes in zip(held, request.block_hashes, strict=True):
            pairs = [(blocks[index], hashes[index]) for index in range(first, num_blocks)]
            self._log("cache", [block_id for block_id, block_hash in pairs if self.pool.cache(block_id, block_hash)])
        request.next_cache_at = max(first, num_blocks) * self.block_size + self.block_size

    def uncache_blocks(self, request: Request) -> None:
        """Let none of the request's blocks be found any more: what they hold is not to be used again."""
        for blocks in self._block_ids.get(request.request_id, ()):
            self._log("uncache", self.pool.uncache(blocks))

    def reset_prefix_cache(self) -> int:
        """Forget what every block holds, also of those in use; the tokens that could be found until now."""
        num_tokens = self.num_cached_tokens
        if self.pool.reset() and self._events is not None:
            self._events.append(BlockEvent("uncache", None, 0, []))
        return num_tokens

    def free(self, request: Request) -> None:
        """Give back all blocks of a request; one that holds none is ignored."""
        request.num_slots = 0
        request.next_cache_at = NEVER
        held = self._block_ids.pop(request.request_id, ())
        for blocks in held:
            # Last block first, so that a prompt's beginning stays longest in the queue.
            self.pool.free(blocks[::-1])
        if held and self._events is not None:
            self._events.append(BlockEvent("free", request.request_id, 0, []))

    def log_events(self, on: bool) -> None:
        """Keep what happens to blocks for `take_events`, or do not."""
        self._events = [] if on else None

    def take_events(self) -> list[BlockEvent]:
        """What has happened since the last call, in order; nothing while nothing is kept."""
        events = self._events
        if not events:
            return []
        self._events = []
        return events

    def state(self) -> PoolState:
        """Every block that is not free: from here on, events tell the rest."""
        return PoolState(self._held(), self.pool.cached_blocks())

    def snapshot(self) -> KVCacheSnapshot:
        return KVCacheSnapshot(
            num_referenced_blocks=self.pool.num_referenced_blocks,
            num_evictable_blocks=self.pool.num_evictable_blocks,
            num_free_blocks=self.pool.num_free_blocks,
            block_ids=self._held(),
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

    def _log(self, kind: BlockEventKind, block_ids: list[int], request: Request | None = None, group: int = 0) -> None:
        if block_ids and self._events is not None:
            self._events.append(BlockEvent(kind, request.request_id if request else None, group, list(block_ids)))

    def _held(self) -> dict[str, list[list[int]]]:
        """A copy of every request's blocks."""
        return {key: [list(blocks) for blocks in groups] for key, groups in self._block_ids.items()}

    def _hash(self, request: Request, num_blocks: int) -> None:
        if not request.block_hashes:
            request.block_hashes = [[] for _ in self._keys]
        for hashes, key in zip(request.block_hashes, self._keys, strict=True):
            extend_block_hashes(hashes, request.token_ids, num_blocks, self.block_size, key)
