"""`BlockMap`: the KV pool at one step, followed by its events alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from backend.core.block_events import BlockEvent, PoolState
from backend.core.block_pool import NULL_BLOCK
from backend.errors import DatabaseError
from backend.metrics.ledger_format import LedgerStep

GIVING = ("allocate", "share", "swap_in")  # kinds of events that add to the blocks of a request


class BlockMap:
    """Begins with a key frame of the ledger and goes on by the events of the steps behind the one it belongs to.

    What an event does to blocks is said here and nowhere else, by its kind in `_apply`. Who follows more than blocks extends
    what that calls.

    Attributes:
        held: request -> its blocks in logical order, one list per KV group; the null block for what is behind a window.
        cached: blocks that can be found by a later request, held or not.
    """

    def __init__(self, state: PoolState) -> None:
        self.held: dict[str, list[list[int]]] = {
            key: [list(blocks) for blocks in groups] for key, groups in state.held.items()
        }
        self.cached: set[int] = set(state.cached)

    def apply(self, events: Iterable[BlockEvent]) -> None:
        """Raises `DatabaseError` for an event about a block or a request that is not there: these are not those that followed."""
        for event in events:
            try:
                self._apply(event)
            except (KeyError, IndexError, ValueError):
                whom = "" if event.request_id is None else f" of request {event.request_id}"
                raise DatabaseError(
                    f"the step ledger is damaged: {event.kind!r}{whom} is about blocks that nobody holds"
                ) from None

    def _apply(self, event: BlockEvent) -> None:
        kind = event.kind
        if kind in GIVING:
            self._give(event)
        elif kind in ("free", "preempt", "swap_out"):
            self._release(event)
        elif kind == "cache":
            self._find(event)
        elif kind in ("evict", "uncache"):
            self._lose(event)
        elif kind == "copy":
            self._copy(event)
        elif kind == "give_back":
            self._give_back(event)
        else:
            assert kind == "slide", kind
            self._slide(event)

    def ref_counts(self) -> Counter[int]:
        """Block -> requests that hold it."""
        counts = Counter(block_id for groups in self.held.values() for blocks in groups for block_id in blocks)
        del counts[NULL_BLOCK]
        return counts

    def counts(self, num_blocks: int) -> tuple[int, int, int]:
        """Referenced, evictable and free blocks of a pool of so many."""
        referenced = self.ref_counts()
        evictable = sum(block_id not in referenced for block_id in self.cached)
        return len(referenced), evictable, num_blocks - len(referenced) - evictable

    def _give(self, event: BlockEvent) -> None:
        """A request has more blocks, behind those it had."""
        assert event.request_id is not None
        groups = self.held.setdefault(event.request_id, [])
        while len(groups) <= event.group:
            groups.append([])
        groups[event.group].extend(event.block_ids)

    def _copy(self, event: BlockEvent) -> None:
        """A request has another block in place of one."""
        assert event.request_id is not None
        blocks = self.held[event.request_id][event.group]
        source, destination = event.block_ids
        blocks[blocks.index(source)] = destination

    def _slide(self, event: BlockEvent) -> None:
        """A request has given up some blocks, and keeps their places."""
        assert event.request_id is not None
        blocks = self.held[event.request_id][event.group]
        begin = blocks.index(event.block_ids[0])
        blocks[begin : begin + len(event.block_ids)] = [NULL_BLOCK] * len(event.block_ids)

    def _give_back(self, event: BlockEvent) -> None:
        """A request has given up its last blocks."""
        assert event.request_id is not None
        blocks = self.held[event.request_id][event.group]
        del blocks[blocks.index(event.block_ids[0]) :]

    def _release(self, event: BlockEvent) -> None:
        """A request has given up all blocks."""
        assert event.request_id is not None
        del self.held[event.request_id]

    def _find(self, event: BlockEvent) -> None:
        """Blocks can be found."""
        self.cached.update(event.block_ids)

    def _lose(self, event: BlockEvent) -> None:
        """Blocks cannot be found any more; without ids, no block can."""
        if event.block_ids:
            self.cached.difference_update(event.block_ids)
        else:
            self.cached.clear()


class FilledBlockMap(BlockMap):
    """Also how many tokens are in the blocks of each request.

    Attributes:
        num_tokens: request -> those of the step followed last included; without requests of which that is not known.
    """

    def __init__(self, state: PoolState, num_tokens: Mapping[str, int], block_size: int) -> None:
        super().__init__(state)
        self.num_tokens = dict(num_tokens)
        self.block_size = block_size

    def follow(self, step: LedgerStep) -> None:
        """Raises as `apply`."""
        self.apply(step.events)
        num_tokens = self.num_tokens
        for request_id, num_scheduled_tokens, _ in step.entries:
            if request_id in num_tokens:
                num_tokens[request_id] += num_scheduled_tokens

    def _give(self, event: BlockEvent) -> None:
        request_id, num_tokens = event.request_id, self.num_tokens
        assert request_id is not None
        if request_id not in self.held:
            num_tokens[request_id] = 0
        # Groups have the same number of blocks, for the same tokens. What is allocated holds none.
        if event.kind != "allocate" and not event.group and request_id in num_tokens:
            num_tokens[request_id] += tokens_given(event, self.block_size)
        super()._give(event)

    def _release(self, event: BlockEvent) -> None:
        super()._release(event)
        assert event.request_id is not None
        self.num_tokens.pop(event.request_id, None)


def tokens_given(event: BlockEvent, block_size: int) -> int:
    """Tokens that a request has in the blocks that it gets with one of the `GIVING` events."""
    if event.kind == "share":
        return event.num_tokens or len(event.block_ids) * block_size
    return event.num_tokens
