"""`KVCacheManager`: the blocks each request holds, hiding the pool from the scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Literal

from backend.core.block_events import BlockEvent, BlockEventKind, PoolState
from backend.core.block_hash import BlockHash
from backend.core.block_pool import NULL_BLOCK, BlockPool
from backend.core.kv_blocks import ComputedBlocks, KVAllocation, KVCacheSnapshot
from backend.core.kv_groups import KVGroupSpec
from backend.core.kv_windows import KVWindows
from backend.core.prefix_lookup import PrefixLookup
from backend.request import NEVER, Request


class KVCacheManager:
    """The pool's only user. A block that others hold or can find is not written to, see `KVAllocation.copies`: copy-on-write.

    Args:
    num_blocks: usable blocks, of all groups together.
    block_size: tokens per block.
    groups: KV shapes of the model. Blocks of a group with a window are given back when they have fallen behind it; the null
        block stays in their places.
    prefix_key: with one, full blocks whose tokens are computed can be found and shared by requests that begin alike, see
        `block_hash.prefix_key`; None: blocks do not outlive their request.
    max_num_batched_tokens: most tokens of a step, which decides how many blocks a window needs.
    """

    shares_blocks = True  # among the samples of a prompt

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KVGroupSpec],
        prefix_key: BlockHash | None = None,
        *,
        max_num_batched_tokens: int = NEVER,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._num_groups = len(groups)
        self.windows = KVWindows([group.window for group in groups], block_size, max_num_batched_tokens)
        self._block_ids: dict[str, list[list[int]]] = {}
        self._events: list[BlockEvent] | None = None
        self._prefixes = PrefixLookup(prefix_key, len(groups), block_size, self.windows)

    @property
    def caches_prefixes(self) -> bool:
        return self._prefixes.is_on

    @property
    def usage(self) -> float:
        """Referenced / usable blocks, 0..1."""
        return self.pool.num_referenced_blocks / self.pool.num_blocks

    @property
    def num_groups(self) -> int:
        return self._num_groups

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV can be found, of one group."""
        return self.pool.num_cached_blocks // self._num_groups * self.block_size

    def blocks_needed(self, num_tokens: int) -> int:
        """The most blocks that one request holds on its way to so many tokens, over all groups."""
        return self.windows.peak_blocks(num_tokens)

    def num_blocks_of(self, request: Request) -> int:
        return sum(len(blocks) - blocks.count(NULL_BLOCK) for blocks in self._block_ids.get(request.request_id, ()))

    def block_ids_of(self, request: Request) -> list[list[int]]:
        """A copy, one list per group; empty ones of a request that holds none."""
        held = self._block_ids.get(request.request_id) or [[] for _ in range(self._num_groups)]
        return [list(blocks) for blocks in held]

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """What a waiting request can begin with.

        The last token is never among it: it has to run for the next one to be sampled.
        """
        held = self._block_ids.get(request.request_id)
        if held is not None:
            return ComputedBlocks(held, request.num_computed_tokens, "held")
        found = self._prefixes.find(request, self.pool)
        if request.samples is not None and request.num_forked_tokens > found.num_tokens:
            for other in request.samples:
                if other.num_computed_tokens >= request.num_forked_tokens:
                    computed = self.blocks_of_sample(other, request.num_forked_tokens)
                    if computed is not None:
                        return computed
        return found

    def blocks_of_sample(self, sample: Request, num_tokens: int) -> ComputedBlocks | None:
        """Those of the first `num_tokens` tokens of a request that has computed as many.

        None when it has given back one that the next token sees.
        """
        num_blocks = -(-num_tokens // self.block_size)
        held = [blocks[:num_blocks] for blocks in self._block_ids[sample.request_id]]
        if self.windows.slides:
            if any(
                NULL_BLOCK in blocks[num_behind:]
                for blocks, num_behind in zip(held, self.windows.behind(num_tokens), strict=True)
            ):
                return None
            held = self.windows.within_reach(held, num_tokens)
        return ComputedBlocks(held, num_tokens, "sample")

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
        if self._prefixes.is_on:
            request.next_cache_at = computed.num_tokens // self.block_size * self.block_size + self.block_size
        return []

    def shared_from(self, first: int, held: list[list[int]]) -> list[tuple[int, int]]:
        """(group, index) of the blocks of a request, from the `first` on, that somebody else holds too, or could find."""
        places = [(group, index) for group, blocks in enumerate(held) for index in range(first, len(blocks))]
        return [(group, index) for group, index in places if self.pool.is_read_only(held[group][index])]

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

        First gives back what has fallen behind a window. Returns None, changing nothing else, when the pool cannot give the
        blocks.

        Args:
            kind: of the event; `swap_in` where the tokens come with their KV.
        """
        num_more = num_new_tokens + num_lookahead_tokens
        is_full = 0 < request.num_slots == request.num_computed_tokens
        if is_full and num_more <= self.block_size and kind == "allocate" and not self.windows.slides:
            return self._append_block(request)
        num_tokens = request.num_computed_tokens + num_more
        held = self._block_ids.get(request.request_id) or [[] for _ in range(self._num_groups)]
        # All groups have the same number: a position behind a group's window still has its entry.
        missing = max(0, -(-num_tokens // self.block_size) - len(held[0]))
        nulls = [0] * self._num_groups  # of the new entries, those that hold nothing
        if self.windows.slides:
            self._slide(request, held)
            if kind == "swap_in":
                behind = self.windows.behind(num_tokens)
                nulls = [max(0, min(num_behind - len(held[0]), missing)) for num_behind in behind]
        shared = self.shared_from(request.num_computed_tokens // self.block_size, held)
        taken = self.pool.allocate(missing * self._num_groups - sum(nulls) + len(shared))
        if taken is None:
            return None
        self._log("evict", taken.evicted)
        block_ids = iter(taken.block_ids)
        new_block_ids = [[NULL_BLOCK] * count + list(islice(block_ids, missing - count)) for count in nulls]
        for group, (blocks, more) in enumerate(zip(held, new_block_ids, strict=True)):
            blocks.extend(more)
            self._log(kind, more, request, group, num_new_tokens if kind == "swap_in" else 0)
        copies = []
        for (group, index), destination in zip(shared, block_ids, strict=True):
            source, held[group][index] = held[group][index], destination
            self.pool.free([source])
            self._log("copy", [source, destination], request, group)
            copies.append((source, destination))
        self._block_ids[request.request_id] = held
        request.num_slots = len(held[0]) * self.block_size
        return KVAllocation(new_block_ids, copies)

    def _append_block(self, request: Request) -> KVAllocation | None:
        """`allocate_slots` where all blocks of a request are full, and one more of each group is enough: most calls."""
        taken = self.pool.allocate(self._num_groups)
        if taken is None:
            return None
        if taken.evicted:
            self._log("evict", taken.evicted)
        for group, (blocks, block_id) in enumerate(
            zip(self._block_ids[request.request_id], taken.block_ids, strict=True)
        ):
            blocks.append(block_id)
            if self._events is not None:
                self._events.append(BlockEvent("allocate", request.request_id, group, [block_id]))
        request.num_slots += self.block_size
        return KVAllocation([[block_id] for block_id in taken.block_ids], [])

    def cache_blocks(self, request: Request) -> None:
        """Let the request's full blocks be found, as far as their tokens are known and computed.

        A step that is on its way counts as computed: whoever finds a block runs in a later one.
        """
        num_blocks = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        first = request.next_cache_at // self.block_size - 1
        self._prefixes.hash(request, num_blocks)
        held = self._block_ids[request.request_id]
        for blocks, hashes in zip(held, request.block_hashes, strict=True):
            # A token's id may become known when its block is behind the window already.
            pairs = [
                (blocks[index], hashes[index]) for index in range(first, num_blocks) if blocks[index] != NULL_BLOCK
            ]
            self._log("cache", [block_id for block_id, block_hash in pairs if self.pool.cache(block_id, block_hash)])
        request.next_cache_at = max(first, num_blocks) * self.block_size + self.block_size

    def uncache_blocks(self, request: Request) -> None:
        """Let none of the request's blocks be found any more: what they hold is not to be used again."""
        for group, blocks in enumerate(self._block_ids.get(request.request_id, ())):
            hashes = request.block_hashes[group][: blocks.count(NULL_BLOCK)] if request.block_hashes else []
            given_back = [block_id for block_id in map(self.pool.lookup, hashes) if block_id is not None]
            self._log("uncache", self.pool.uncache([*given_back, *blocks]))

    def reset_prefix_cache(self) -> int:
        """Forget what every block holds, also of those in use; the tokens that could be found until now."""
        num_tokens = self.num_cached_tokens
        if self.pool.reset() and self._events is not None:
            self._events.append(BlockEvent("uncache", None, 0, []))
        return num_tokens

    def give_back_lookahead(self, request: Request, num_reached: int = 0) -> int | None:
        """Give back the blocks behind those of the computed tokens and of `num_reached` more; how many each KV group keeps, None
        if there were none."""
        num_tokens, held = request.num_computed_tokens + num_reached, self._block_ids[request.request_id]
        num_kept = -(-num_tokens // self.block_size)
        if len(held[0]) <= num_kept:
            return None
        for group, blocks in enumerate(held):
            gone = blocks[num_kept:]
            del blocks[num_kept:]
            self.pool.free(gone)
            self._log("give_back", gone, request, group)
        request.num_slots = num_kept * self.block_size
        return num_kept

    def free(self, request: Request) -> None:
        """Give back all blocks of a request; one that holds none is ignored."""
        if self._release(request):
            self._log("free", [], request, even_if_empty=True)

    def log_events(self, on: bool) -> None:
        """Keep what happens to blocks for `take_events`, or do not."""
        self._events = [] if on else None

    def take_events(self) -> list[BlockEvent]:
        """What has happened since the last call, in order; nothing while nothing is kept."""
        events, self._events = self._events, None if self._events is None else []
        return events or []

    def state(self, requests: Mapping[str, Request] | None = None) -> PoolState:
        """Every block that is not free, and the tokens of these requests: from here on, events tell the rest."""
        known = requests or {}
        num_tokens = {key: known[key].num_computed_tokens for key in self._block_ids if key in known}
        return PoolState(self._held(), self.pool.cached_blocks(), num_tokens)

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
        held = Counter(block for groups in self._block_ids.values() for blocks in groups for block in blocks if block)
        for block_id in range(1, self.pool.num_blocks + 1):
            if held[block_id] != self.pool.ref_cnt(block_id):
                raise RuntimeError(
                    f"block {block_id} has {self.pool.ref_cnt(block_id)} references but {held[block_id]} holders"
                )
        for request_id, groups in self._block_ids.items():
            for blocks, limit in zip(groups, self.windows.limits, strict=True):
                num_null = blocks.count(NULL_BLOCK)
                if len(blocks) != len(groups[0]) or any(blocks[:num_null]) or len(blocks) - num_null > limit:
                    raise RuntimeError(f"the tables of request {request_id} do not fit its windows: {groups}")

    def _release(self, request: Request) -> bool:
        """Give back all blocks; whether there were any."""
        request.num_slots = 0
        request.next_cache_at = NEVER
        held = self._block_ids.pop(request.request_id, ())
        for blocks in held:
            # Last block first, so that a prompt's beginning stays longest in the queue.
            self.pool.free(blocks[::-1])
        return any(held)

    def _slide(self, request: Request, held: list[list[int]]) -> None:
        """Give back what lies behind a window."""
        # Samples of a prompt fork from its last token but one, mostly in the step after it was computed.
        num_computed_tokens = request.num_computed_tokens - (request.samples is not None)
        for group, (blocks, end) in enumerate(zip(held, self.windows.behind(num_computed_tokens), strict=True)):
            begin = end = min(end, len(blocks))
            while begin > 0 and blocks[begin - 1] != NULL_BLOCK:
                begin -= 1
            if begin < end:
                gone, blocks[begin:end] = blocks[begin:end], [NULL_BLOCK] * (end - begin)
                self.pool.free(gone)
                self._log("slide", gone, request, group)

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
