"""`PrefixHistory`: which KV blocks could be found from when to when, and what each request found, from a ledger's events.

It knows places and not tokens: a block that can be found holds the tokens of the request that held it then, at that place.
Moments are numbers of block events of the run, so that what happens within one step has its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from backend.core.block_events import BlockEvent
from backend.core.block_pool import NULL_BLOCK
from backend.metrics.ledger_format import LedgerEntry, LedgerStep
from backend.metrics.ledger_reader import LedgerReader

NEVER = 2**62  # a moment that has not come

_NOBODY: Mapping[str | None, tuple[int, int]] = {None: (0, 0)}

# evicted: to make room; reset: the whole cache was; withdrawn: what it held turned out to be damaged
End = Literal["evicted", "reset", "withdrawn"]


@dataclass(slots=True, eq=False)
class BlockLife:
    """A block while it could be found: at moments `begin <= at < end`."""

    owner: str | None  # whose tokens it held; None: it could be found before the run began
    index: int  # which of the owner's blocks
    group: int
    begin: int
    begin_step: int
    end: int = NEVER
    end_step: int | None = None
    how: End | None = None
    taken_by: str | None = None  # of an evicted one, who got the block

    def is_findable(self, at: int) -> bool:
        return self.begin <= at < self.end


@dataclass(slots=True, eq=False)
class Admission:
    """A request's first admission."""

    request_id: str
    at: int  # the moment at which it looked for blocks
    step: int  # that was being put together
    found: list[list[BlockLife | None]]  # blocks of the prefix cache it began with, per KV group; None behind a window
    is_forked: bool = False  # began with the blocks of another sample of its prompt
    is_open: bool = True  # as long as it takes its first blocks
    computing: tuple[tuple[str, int], ...] = ()  # who ran and had not come to decoding, with tokens computed

    @property
    def num_found(self) -> int:
        """Blocks of each group."""
        return len(self.found[0]) if self.found and not self.is_forked else 0


@dataclass(slots=True)
class PrefixHistory:
    """Grows with the ledger.

    Attributes:
        lives: of all blocks that could ever be found, in the order in which they began to.
        admissions: by request, in order.
        sliding: KV groups with a window, as far as it has been seen to move.
        ends: request -> the moment at which it gave up its blocks for good. A request that ends without blocks, because it
            waits, has no event that says so.
    """

    block_size: int
    lives: list[BlockLife] = field(default_factory=list)
    admissions: dict[str, Admission] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    num_groups: int = 1
    sliding: set[int] = field(default_factory=set)
    next_step: int = 0
    _num_events: int = 0
    _held: dict[str, list[list[int]]] = field(default_factory=dict)
    _holders: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)  # block -> holder -> (group, index)
    _findable: dict[int, BlockLife] = field(default_factory=dict)  # by block
    _evicted: list[BlockLife] = field(default_factory=list)  # by the event before
    _computed: dict[str, int] = field(default_factory=dict)
    _computing: dict[str, None] = field(default_factory=dict)  # who runs and has not come to decoding

    def extend(self, reader: LedgerReader) -> bool:
        """Take in what the ledger has beyond what is known; False for one that was written before there were block events.

        Raises `DatabaseError` for a damaged ledger.
        """
        steps = reader.steps
        if not self.next_step and steps:
            before = reader.block_map(steps.start)
            if before is None:
                return False
            self._take(reader.step(steps.start))
            for block_id in sorted(before.cached):
                self._known(block_id)
            self._seat(before.held)
            self.next_step = steps.start + 1
        for step in reader.read(self.next_step, steps.stop - 1):
            self._take(step)
        self.next_step = max(self.next_step, steps.stop)
        return True

    def _take(self, step: LedgerStep) -> None:
        for event in step.events:
            self._apply(event, step.step)
            self._num_events += 1
        for entry in step.entries:
            self._run(entry)

    def _apply(self, event: BlockEvent, step: int) -> None:
        after, blocks = self._num_events + 1, event.block_ids
        evicted, self._evicted = self._evicted, []
        match event.kind:
            case "share" | "allocate" | "swap_in":
                self._give(event, step, made_room=bool(evicted))
            case "copy":
                self._copy(event)
            case "slide":
                self._slide(event)
            case "evict":
                self._evicted = self._end(blocks, "evicted", after, step)
            case "cache":
                for block_id in blocks:
                    # All who hold it have the same tokens there.
                    owner, (group, index) = next(iter(self._holders.get(block_id, _NOBODY).items()))
                    self._begin(block_id, BlockLife(owner, index, group, after, step))
            case "uncache":
                self._end(blocks or list(self._findable), "withdrawn" if blocks else "reset", after, step)
            case "free" | "preempt" | "swap_out":
                self._release(event, after)
        for life in evicted:
            life.taken_by = event.request_id

    def _give(self, event: BlockEvent, step: int, *, made_room: bool) -> None:
        request_id = event.request_id
        assert request_id is not None
        admission = self.admissions.get(request_id)
        if admission is None:
            # Blocks are looked for before room is made.
            at = self._num_events - (made_room and event.kind == "allocate")
            computing = tuple((other, self._computed[other]) for other in self._computing)
            admission = self.admissions[request_id] = Admission(request_id, at, step, [], computing=computing)
        if request_id not in self._held:
            self._computing[request_id] = None
        if event.kind == "share" and event.num_tokens:
            admission.is_forked |= admission.is_open
        elif event.kind == "share" and admission.is_open:
            admission.found.append(
                [None if block_id == NULL_BLOCK else self._known(block_id) for block_id in event.block_ids]
            )
        elif event.kind != "share":
            admission.is_open = False
        self.num_groups = max(self.num_groups, event.group + 1)
        self.ends.pop(request_id, None)
        groups = self._held.setdefault(request_id, [])
        while len(groups) <= event.group:
            groups.append([])
        for index, block_id in enumerate(event.block_ids, start=len(groups[event.group])):
            if block_id != NULL_BLOCK:
                self._holders.setdefault(block_id, {})[request_id] = (event.group, index)
        groups[event.group].extend(event.block_ids)
        found = event.num_tokens
        if event.kind == "share" and not found:
            found = len(event.block_ids) * self.block_size
        self._computed[request_id] = self._computed.get(request_id, 0) + (0 if event.group else found)

    def _copy(self, event: BlockEvent) -> None:
        assert event.request_id is not None
        source, destination = event.block_ids
        place = self._holders.get(source, {}).pop(event.request_id, None)
        if place is None:  # of a request from before the run
            return
        self._holders.setdefault(destination, {})[event.request_id] = place
        self._held[event.request_id][place[0]][place[1]] = destination

    def _slide(self, event: BlockEvent) -> None:
        assert event.request_id is not None
        self.sliding.add(event.group)
        for block_id in event.block_ids:
            place = self._holders.get(block_id, {}).pop(event.request_id, None)
            if place is not None:
                self._held[event.request_id][place[0]][place[1]] = NULL_BLOCK

    def _release(self, event: BlockEvent, after: int) -> None:
        request_id = event.request_id
        assert request_id is not None
        for block_id in (block_id for blocks in self._held.pop(request_id, ()) for block_id in blocks):
            self._holders.get(block_id, {}).pop(request_id, None)
        self._computed[request_id] = 0
        self._computing.pop(request_id, None)
        if request_id in self.admissions:
            self.admissions[request_id].is_open = False
        if event.kind == "free":
            self.ends[request_id] = after

    def _run(self, entry: LedgerEntry) -> None:
        request_id = entry.request_id
        self._computed[request_id] = self._computed.get(request_id, 0) + entry.num_scheduled_tokens
        if entry.kind == "decode":
            self._computing.pop(request_id, None)

    def _seat(self, held: Mapping[str, list[list[int]]]) -> None:
        """Requests from before the run go on in it."""
        for request_id, groups in held.items():
            if request_id not in self._held:
                self._held[request_id] = [list(blocks) for blocks in groups]
                for group, blocks in enumerate(groups):
                    for index, block_id in enumerate(blocks):
                        if block_id != NULL_BLOCK:
                            self._holders.setdefault(block_id, {})[request_id] = (group, index)

    def _begin(self, block_id: int, life: BlockLife) -> BlockLife:
        self._findable[block_id] = life
        self.lives.append(life)
        return life

    def _known(self, block_id: int) -> BlockLife:
        """One that can be found and never began to, could before the run."""
        return self._findable.get(block_id) or self._begin(block_id, BlockLife(None, 0, 0, 0, 0))

    def _end(self, block_ids: Iterable[int], how: End, end: int, step: int) -> list[BlockLife]:
        """What ended with them; of blocks from before the run nothing is known in its first step."""
        ended = [self._findable.pop(block_id) for block_id in block_ids if block_id in self._findable]
        for life in ended:
            life.end, life.end_step, life.how = end, step, how
        return ended
