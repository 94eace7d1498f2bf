"""`KVCacheManager`: the blocks each request holds, hiding the pool from the scheduler."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from backend.core.block_events import BlockEvent, BlockEventKind, PoolState
from backend.core.block_hash import BlockHash, extend_block_hashes
from backend.core.block_pool import NULL_BLOCK, BlockPool
from backend.core.kv_blocks import ComputedBlocks, KVAllocation, KVCacheSnapshot
from backend.core.kv_format import PLAIN, KVFormat
from backend.request import NEVER, Request


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers whose KV has one shape and one lifetime. A block id addresses the same slot in each of them."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int  # of an element in the model's dtype
    window: int | None = None
    format: KVFormat = PLAIN

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers of the group, with their scales."""
        return 2 * self.num_layers * self.num_kv_heads * self.format.bytes_per_vector(self.head_dim, self.dtype_bytes)


class KVCacheManager:
    """The pool's only user. A block that others hold or can find is not written to, see `KVAllocation.copies`: copy-on-write.

    Args:
    num_blocks: usable blocks, of all groups together.
    block_size: tokens per block.
    groups: KV shapes of the model.
    prefix_key: with one, full blocks whose tokens are computed can be found and shared by requests that begin alike, see
        `block_hash.prefix_key`; None: blocks do not outlive their request.
    """

    shares_blocks = True  # among the samples of a prompt

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

    def block_ids_of(self, request: Request) -> list[list[int]]:
        """A copy, one list per group."""
        return [list(blocks) for blocks in self._block_ids[request.request_id]]

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """What a waiting request can begin with.

        The last token is never among it: it has to run for the next one to be sampled.
        """
        held = self._block_ids.get(request.request_id)
        if held is not None:
            return ComputedBlocks(held, request.num_computed_tokens, "held")
        found = self._find(request)
        if request.samples is not None and request.num_forked_tokens > found.num_tokens:
            for other in request.samples:
                if other.num_computed_tokens >= request.num_forked_tokens:
                    return self.blocks_of_sample(other, request.num_forked_tokens)
        return found

    def blocks_of_sample(self, sample: Request, num_tokens: int) -> ComputedBlocks:
        """Those of the first `num_tokens` tokens of a request that has computed as many."""
        num_blocks = -(-num_tokens // self.block_size)
        held = self._block_ids[sample.request_id]
        return ComputedBlocks([blocks[:num_blocks] for blocks in held], num_tokens, "sample")

    def num_kept_blocks(self, computed: ComputedBlocks) -> int:
        """Blocks that somebody holds and that a request which begins with them need not take or copy."""
        num_full = computed.num_tokens // self.block_size
        num_kept = sum(
            self.pool.ref_cnt(block_id) > 0 for blocks in computed.block_ids for block_id in blocks[:num_full]
        )
        if computed.origin == "held":
            num_partial = sum(len(blocks) - num_full for blocks in computed.block_ids)
            num_kept += num_partial - len(self._shared_from(num_full, computed.block_ids))
        return num_kept

    def take_computed_blocks(self, request: Request, computed: ComputedBlocks) -> list[tuple[int, int]]:
        """Begin a request with the blocks that `get_computed_blocks` has just found.

        Returns what is to be copied out of host memory first, as (host block, block).
        """
        if computed.origin == "held":
            return []
        num_tokens = computed.num_tokens if computed.origin == "sample" else 0
        for group, blocks in enumerate(computed.block_ids):
            self.pool.share(blocks)
            self._log("share", blocks, request, group, num_tokens)
        self._block_ids[request.request_id] = [list(blocks) for blocks in computed.block_ids]
        request.num_computed_tokens = computed.num_tokens
        request.num_slots = len(computed.block_ids[0]) * self.block_size
        if self._keys:
            request.next_cache_at = computed.num_tokens // self.block_size * self.block_size + self.block_size
        return []

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        """Give back all blocks of a request whose KV goes to host memory; what is to be copied, as (block, host block).

        Returns None, changing nothing, where there is no such memory or it is full.
        """
        return None

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        kind: Literal["allocate", "swap_in"] = "allocate",
    ) -> KVAllocation | None:
        """Make room for `num_new_tokens` after the computed ones, and for draft tokens behind them.

        Returns None, changing nothing, when the pool cannot give the blocks.

        Args:
            kind: of the event; `swap_in` where the tokens come with their KV.
        """
        num_tokens = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        held = self._block_ids.get(request.request_id) or [[] for _ in range(self._num_groups)]
        # All groups have the same number: a position behind a group's window still has its entry.
        missing = max(0, -(-num_tokens // self.block_size) - len(held[0]))
        shared = self._shared_from(request.num_computed_tokens // self.block_size, held)
        taken = self.pool.allocate(missing * self._num_groups + len(shared))
        if taken is None:
            return None
        self._log("evict", taken.evicted)
        new_block_ids = [taken.block_ids[group * missing : (group + 1) * missing] for group in range(self._num_groups)]
        for group, (blocks, more) in enumerate(zip(held, new_block_ids, strict=True)):
            blocks.extend(more)
            self._log(kind, more, request, group, num_new_tokens if kind == "swap_in" else 0)
        copies = []
        for (group, index), destination in zip(shared, taken.block_ids[missing * self._num_groups :], strict=True):
            source, held[group][index] = held[group][index], destination
            self.pool.free([source])
            self._log("copy", [source, destination], request, group)
            copies.append((source, destination))
        self._block_ids[request.request_id] = held
        request.num_slots = len(held[0]) * self.block_size
        return KVAllocation(new_block_ids, copies)

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
        if self._release(request):
            self._log("free", [], request, even_if_empty=True)

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

    def _release(self, request: Request) -> bool:
        """Give back all blocks; whether there were any."""
        request.num_slots = 0
        request.next_cache_at = NEVER
        held = self._block_ids.pop(request.request_id, ())
        for blocks in held:
            # Last block first, so that a prompt's beginning stays longest in the queue.
            self.pool.free(blocks[::-1])
        return any(held)

    def _find(self, request: Request) -> ComputedBlocks:
        """What the prefix cache has of it."""
        num_blocks = (request.num_tokens - 1) // self.block_size if self._keys else 0
        self._hash(request, num_blocks)
        found: list[list[int]] = [[] for _ in range(self._num_groups)]
        for index in range(num_blocks):
            block_ids = [self.pool.lookup(hashes[index]) for hashes in request.block_hashes]
            if None in block_ids:
                break
            for blocks, block_id in zip(found, block_ids, strict=True):
                blocks.append(block_id)  # pyright: ignore[reportArgumentType]
        return ComputedBlocks(found, len(found[0]) * self.block_size, "cache")

    def _shared_from(self, first: int, held: list[list[int]]) -> list[tuple[int, int]]:
        """(group, index) of the blocks from the `first` on that somebody else holds too, or could find."""
        places = [(group, index) for group, blocks in enumerate(held) for index in range(first, len(blocks))]
        return [(group, index) for group, index in places if self.pool.is_read_only(held[group][index])]

    def _log(
        self,
        kind: BlockEventKind,
        block_ids: list[int],
        request: Request | None = None,
        group: int = 0,
        num_tokens: int = 0,
        *,
        even_if_empty: bool = False,
    ) -> None:
        if self._events is not None and (block_ids or even_if_empty):
            request_id = request.request_id if request else None
            self._events.append(BlockEvent(kind, request_id, group, list(block_ids), num_tokens))

    def _held(self) -> dict[str, list[list[int]]]:
        """A copy of every request's blocks."""
        return {key: [list(blocks) for blocks in groups] for key, groups in self._block_ids.items()}

    def _hash(self, request: Request, num_blocks: int) -> None:
        if not request.block_hashes:
            request.block_hashes = [[] for _ in self._keys]
        for hashes, key in zip(request.block_hashes, self._keys, strict=True):
            extend_block_hashes(hashes, request.token_ids, num_blocks, self.block_size, key)
