"""`PrefixHistory`: which KV blocks could be found from when to when, and what each request found, from a ledger's events.

It knows places and not tokens: a block that can be found holds the tokens of the request that held it then, at that place.
Moments are numbers of block events of the run, so that what happens within one step has its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from backend.core.block_events import BlockEvent, PoolState
from backend.core.block_pool import NULL_BLOCK
from backend.metrics.block_map import FilledBlockMap
from backend.metrics.ledger_format import LedgerStep
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


class PrefixHistory(FilledBlockMap):
    """A block map that also remembers. Grows with the ledger.

    Attributes:
        lives: of all blocks that could ever be found, in the order in which they began to.
        admissions: by request, in order.
        sliding: KV groups with a window, as far as it has been seen to move.
        ends: request -> the moment at which it gave up its blocks for good. A request that ends without blocks, because it
            waits, has no event that says so.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(PoolState({}, []), {}, block_size)
        self.lives: list[BlockLife] = []
        self.admissions: dict[str, Admission] = {}
        self.ends: dict[str, int] = {}
        self.num_groups = 1
        self.sliding: set[int] = set()
        self.next_step = 0
        self._step = 0  # that is being followed
        self._num_events = 0
        self._holders: dict[int, dict[str, tuple[int, int]]] = {}  # block -> holder -> (group, index)
        self._findable: dict[int, BlockLife] = {}  # by block
        self._evicted: list[BlockLife] = []  # and not taken yet
        self._computing: dict[str, None] = {}  # who runs and has not come to decoding

    def extend(self, reader: LedgerReader) -> bool:
        """Take in what the ledger has beyond what is known; False for one that was written before there were block events.

        Raises `DatabaseError` for a damaged ledger, and is of no use then.
        """
        steps = reader.steps
        if not self.next_step and steps:
            before = reader.since_key_frame(steps.start)
            if before is None:
                return False
            frame, (first,) = before
            self.follow(first)
            self._seat(frame)
        for step in reader.read(self.next_step, steps.stop - 1):
            self.follow(step)
        return True

    def follow(self, step: LedgerStep) -> None:
        self._step = step.step
        super().follow(step)
        if self._computing:
            for request_id, _, kind in step.entries:
                if kind == "decode":
                    self._computing.pop(request_id, None)
        self.next_step = step.step + 1

    def apply(self, events: Iterable[BlockEvent]) -> None:
        """In the first step nothing is known of what was there before: events of that are passed over, see `_seat`."""
        super().apply(self._counted(events))

    def _counted(self, events: Iterable[BlockEvent]) -> Iterator[BlockEvent]:
        for event in events:
            yield event
            self._num_events += 1

    def _seat(self, frame: PoolState) -> None:
        """What was there before the run goes on in it.

        Args:
            frame: of the first step, which has been followed.
        """
        for block_id in sorted(frame.cached):
            self._known(block_id)
        self.cached.update(frame.cached)
        for request_id, groups in frame.held.items():
            if self.held.get(request_id) == groups:
                continue
            self.held[request_id] = [list(blocks) for blocks in groups]
            for group, blocks in enumerate(groups):
                for index, block_id in enumerate(blocks):
                    if block_id != NULL_BLOCK:
                        self._holders.setdefault(block_id, {})[request_id] = (group, index)
            if request_id in frame.num_tokens:
                self.num_tokens[request_id] = frame.num_tokens[request_id]
            else:
                self.num_tokens.pop(request_id, None)
                self._computing.pop(request_id, None)

    def _give(self, event: BlockEvent) -> None:
        _, request_id, group, block_ids, num_tokens = event
        assert request_id is not None
        admission = self.admissions.get(request_id)
        if admission is None:
            # Blocks are looked for before room is made.
            at = self._num_events - (bool(self._evicted) and event.kind == "allocate")
            computing = tuple((other, self.num_tokens[other]) for other in self._computing)
            admission = Admission(request_id, at, self._step, [], computing=computing)
            self.admissions[request_id] = admission
        if request_id not in self.held:
            self._computing[request_id] = None
            self.ends.pop(request_id, None)
        if event.kind != "share":
            admission.is_open = False
        elif num_tokens:
            admission.is_forked |= admission.is_open
        elif admission.is_open:
            admission.found.append(
                [None if block_id == NULL_BLOCK else self._known(block_id) for block_id in block_ids]
            )
        if group >= self.num_groups:
            self.num_groups = group + 1
        if self._evicted:
            self._make_room(request_id)
        super()._give(event)
        holders = self._holders
        for index, block_id in enumerate(block_ids, len(self.held[request_id][group]) - len(block_ids)):
            if block_id != NULL_BLOCK:
                holders.setdefault(block_id, {})[request_id] = (group, index)

    def _copy(self, event: BlockEvent) -> None:
        request_id = event.request_id
        assert request_id is not None
        source, destination = event.block_ids
        if self._evicted:
            self._make_room(request_id)
        place = self._holders.get(source, {}).pop(request_id, None)
        if place is not None:
            super()._copy(event)
            self._holders.setdefault(destination, {})[request_id] = place

    def _make_room(self, request_id: str) -> None:
        """Blocks are evicted for who takes some next."""
        for life in self._evicted:
            life.taken_by = request_id
        self._evicted = []

    def _slide(self, event: BlockEvent) -> None:
        assert event.request_id is not None
        self.sliding.add(event.group)
        places = [self._holders.get(block_id, {}).pop(event.request_id, None) for block_id in event.block_ids]
        if None not in places:
            super()._slide(event)

    def _give_back(self, event: BlockEvent) -> None:
        assert event.request_id is not None
        places = [self._holders.get(block_id, {}).pop(event.request_id, None) for block_id in event.block_ids]
        if None not in places:
            super()._give_back(event)

    def _release(self, event: BlockEvent) -> None:
        request_id = event.request_id
        assert request_id is not None
        for block_id in (block_id for blocks in self.held.get(request_id, ()) for block_id in blocks):
            self._holders.get(block_id, {}).pop(request_id, None)
        self._computing.pop(request_id, None)
        if request_id in self.admissions:
            self.admissions[request_id].is_open = False
        if event.kind == "free":
            self.ends[request_id] = self._num_events + 1
        if request_id in self.held:
            super()._release(event)

    def _find(self, event: BlockEvent) -> None:
        super()._find(event)
        begin, step, findable, lives = self._num_events + 1, self._step, self._findable, self.lives
        for block_id in event.block_ids:
            # All who hold it have the same tokens there. In the first step maybe only somebody from before does.
            owner, (group, index) = next(iter((self._holders.get(block_id) or _NOBODY).items()))
            findable[block_id] = life = BlockLife(owner, index, group, begin, step)
            lives.append(life)

    def _lose(self, event: BlockEvent) -> None:
        super()._lose(event)
        how: End = "evicted" if event.kind == "evict" else "withdrawn" if event.block_ids else "reset"
        # Of blocks from before the run nothing is known in its first step.
        block_ids, findable = event.block_ids or list(self._findable), self._findable
        ended = [findable.pop(block_id) for block_id in block_ids if block_id in findable]
        for life in ended:
            life.end, life.end_step, life.how = self._num_events + 1, self._step, how
        if how == "evicted":
            self._evicted = ended

    def _known(self, block_id: int) -> BlockLife:
        """One that can be found and never began to, could before the run."""
        life = self._findable.get(block_id)
        if life is None:
            self._findable[block_id] = life = BlockLife(None, 0, 0, 0, 0)
            self.lives.append(life)
        return life
