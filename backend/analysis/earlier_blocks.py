"""`EarlierBlocks`: what earlier runs left in the prefix cache, followed through their ledgers by block ids.

A block holds the tokens of the request that it was last allocated to, at the place it has there. The engine keeps its pool
from run to run, so ids mean the same in the next run's ledger. What happens between two ledgers (blocks of a run's last step
become findable after it) shows in the first key frame of the second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from backend.core.block_events import BlockEvent, PoolState
from backend.core.block_pool import NULL_BLOCK
from backend.metrics.block_map import GIVING, BlockMap
from backend.metrics.ledger_format import LedgerStep
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.prefix_history import BlockLife, End


class _Origin(NamedTuple):
    request_id: str | None  # None: of a run that is not known
    group: int
    index: int


_UNKNOWN = _Origin(None, 0, 0)


class EarlierBlocks(BlockMap):
    """Give it the earlier runs in order, then the run itself as it grows.

    Attributes:
        lives: of all blocks that could be found in the earlier runs, `begin` 0. `end` is 0 where that was over when the run
            began, else a moment of the run as `PrefixHistory` counts them. Steps are those of the run in which it ended.
    """

    def __init__(self) -> None:
        super().__init__(PoolState({}, []))
        self.lives: list[BlockLife] = []
        self._origins: dict[int, _Origin] = {}  # by block
        self._findable: dict[int, BlockLife] = {}
        self._evicted: list[BlockLife] = []  # by the event before
        self._step = 0  # that is being followed
        self._end = 0  # the moment at which a life ends now
        self._next_step = 0  # of the run itself

    def take(self, reader: LedgerReader) -> list[str]:
        """A whole earlier run; its requests that had blocks, in order of admission.

        Raises `DatabaseError` for a damaged ledger, `ValueError` for one without block events.
        """
        if not reader.steps:
            return []
        self._begin(reader)
        requests: dict[str, None] = {}
        for step in reader.read(reader.steps.start, reader.steps.stop - 1):
            self._step = step.step
            self.apply(step.events)
            requests |= dict.fromkeys(it.request_id for it in step.events if it.kind in GIVING and it.request_id)
        return list(requests)

    def extend(self, reader: LedgerReader) -> None:
        """Take in what the run's own ledger has beyond what is known. Raises as `take`."""
        if not reader.steps:
            return
        if not self._next_step:
            self._begin(reader)
            self._next_step = reader.steps.start
        for step in reader.read(self._next_step, reader.steps.stop - 1):
            self._step = step.step
            for event in step.events:
                self._end += 1
                self._name_taker(event)
                if event.kind in ("evict", "uncache"):
                    self._lose(event)
            self._next_step = step.step + 1

    def apply(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            self._name_taker(event)
            if event.request_id is None or event.kind in GIVING or event.request_id in self.held:
                super().apply((event,))  # else of a request from before the run, which ends in it

    def _begin(self, reader: LedgerReader) -> None:
        """See to it that what can be found is what the first key frame tells."""
        first = reader.step(reader.steps.start)
        frame = reader.block_map(first.step)
        if frame is None:
            raise ValueError("the step ledger has no block events")
        before = _findable_before(first, frame)
        self._forget(self._findable.keys() - before, "withdrawn")
        for block_id in sorted(before - self._findable.keys()):
            self._know(block_id)
        self.held.clear()  # requests of the run before have given up their blocks
        self._evicted = []

    def _give(self, event: BlockEvent) -> None:
        super()._give(event)
        blocks = self.held[event.request_id or ""][event.group]
        for index, block_id in enumerate(event.block_ids, start=len(blocks) - len(event.block_ids)):
            origin = _Origin(event.request_id, event.group, index)
            if event.kind != "share":
                self._origins[block_id] = origin
            elif block_id != NULL_BLOCK and self._origins.get(block_id, _UNKNOWN).request_id is None:
                # Of a run that is not known, and now somebody has found it: the tokens are the same.
                self._origins[block_id] = origin
                life = self._findable.get(block_id)
                if life is not None:
                    life.owner, life.group, life.index = origin

    def _copy(self, event: BlockEvent) -> None:
        super()._copy(event)
        _, destination = event.block_ids
        index = self.held[event.request_id or ""][event.group].index(destination)
        self._origins[destination] = _Origin(event.request_id, event.group, index)

    def _find(self, event: BlockEvent) -> None:
        super()._find(event)
        for block_id in event.block_ids:
            self._know(block_id)

    def _lose(self, event: BlockEvent) -> None:
        super()._lose(event)
        if event.kind == "evict":
            self._evicted = self._forget(event.block_ids, "evicted")
        elif event.block_ids:
            self._forget(event.block_ids, "withdrawn")
        else:
            self._forget(self._findable.keys(), "reset")

    def _know(self, block_id: int) -> None:
        owner, group, index = self._origins.get(block_id, _UNKNOWN)
        life = self._findable[block_id] = BlockLife(owner, index, group, 0, 0)
        self.lives.append(life)

    def _forget(self, block_ids: Iterable[int], how: End) -> list[BlockLife]:
        ended = [self._findable.pop(block_id) for block_id in list(block_ids) if block_id in self._findable]
        for life in ended:
            life.end, life.end_step, life.how = self._end, self._step, how
        return ended

    def _name_taker(self, event: BlockEvent) -> None:
        """Whoever comes behind an eviction has got the blocks."""
        for life in self._evicted:
            life.taken_by = event.request_id
        self._evicted = []


def _findable_before(first: LedgerStep, frame: BlockMap) -> set[int]:
    """The blocks that could be found before the events of a run's first step, from the pool after them."""
    before: set[int] = set()
    begun: set[int] = set()
    for event in first.events:
        if event.kind == "cache":
            begun.update(event.block_ids)
        elif event.kind in ("evict", "uncache"):
            before.update(block_id for block_id in event.block_ids if block_id not in begun)
    return before | (frame.cached - begun)
