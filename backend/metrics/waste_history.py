"""`WasteHistory`: how many KV slots were held for what in every step of a ledger, and how many of them for nothing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from backend.errors import DatabaseError
from backend.metrics.kv_sums import KVSums
from backend.metrics.kv_use import HeldSlots, KVPool
from backend.metrics.ledger_reader import Chunk, LedgerReader, break_between, read_stored
from backend.metrics.pool_history import PoolHistory

_PER_BUCKET = 4  # steps that a bucket of a thinned history keeps at most


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteSlots(HeldSlots):
    """Named as in `KVUse`."""

    num_slots: int
    num_unused_slots: int
    num_reserved_slots: int
    num_passed_slots: int
    num_unusable_slots: int  # in free blocks
    num_saved_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WastePoint(WasteSlots):
    """One step."""

    step: int
    num_requests: int  # that hold blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteTotals(WasteSlots):
    """Slot-steps: sums over steps, so that a step counts by what is held in it, as requests do in `memory_waste`."""

    most_requests: int  # that held blocks at once


_SUMMED = tuple(field.name for field in fields(WasteSlots))
_COLUMNS = (*_SUMMED, "step", "num_requests")
_FEWEST = _PER_BUCKET + len(_COLUMNS) + 2


class WasteHistory:
    """Grows with the ledger: each chunk is decoded once, each step costs what happened in it.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int, pool: KVPool) -> None:
        self._block_size = block_size
        self._pool = pool
        self._skipped: list[Chunk] = []  # before the first key frame
        self._sums: KVSums | None = None
        self._next_step = 0
        self._problem: str | None = None  # once it is there, nothing more is known
        self._columns = {name: array("q") for name in _COLUMNS}

    @property
    def steps(self) -> range:
        """Those that are known: none in a ledger that was written before there were block events."""
        return range(self._next_step - len(self._columns["step"]), self._next_step)

    @property
    def next_step(self) -> int:
        """Where the chunks to come begin."""
        return self._next_step

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Go on with what has come behind, see `LedgerReader`. Raises `DatabaseError` for a damaged ledger, for good."""
        if self._problem is not None:
            raise DatabaseError(self._problem)
        try:
            for chunk in chunks:
                self._take(chunk)
        except DatabaseError as error:
            self._problem = str(error)
            raise

    def _take(self, chunk: Chunk) -> None:
        _, first, last = chunk
        words = break_between(self._next_step, first)
        if words is not None:
            raise DatabaseError(f"the step ledger is damaged: {words}")
        segment = read_stored(chunk)
        steps = segment.steps
        if self._sums is None:
            self._skipped.append(chunk)
            if segment.key_frame is not None:
                # Key frames of older ledgers do not tell tokens; what came before may.
                moment = PoolHistory(LedgerReader(self._skipped), self._block_size).at(first)
                assert moment is not None
                self._sums, self._skipped = KVSums(moment, self._block_size, self._pool), []
                self._append(first, self._sums)
                steps = steps[1:]
        if self._sums is not None:
            for step in steps:
                self._sums.follow(step)
                self._append(step.step, self._sums)
        self._next_step = last + 1

    def at(self, step: int) -> WastePoint:
        """Raises `IndexError` for a step that is not known."""
        if step not in self.steps:
            raise IndexError(f"step {step:,} is not among {self.steps}")
        place = step - self.steps.start
        return WastePoint(**{name: column[place] for name, column in self._columns.items()})

    def thinned(self, max_points: int, from_step: int = 0) -> list[WastePoint]:
        """Steps to draw from that one on, in order: all of them, or about `max_points`.

        The first, the last and those in which a figure is at its largest are kept, and of each stretch of steps the ones
        with the least and the most that is held, and that is wasted. Raises `ValueError` for too few points to do so.
        """
        if max_points < _FEWEST:
            raise ValueError(f"max_points {max_points} is below {_FEWEST}")
        begin = self._place_of(from_step)
        steps = self.steps[begin:]
        if len(steps) <= max_points:
            return [self.at(step) for step in steps]
        columns = {name: np.array(column[begin:]) for name, column in self._columns.items()}
        wasted = columns["num_unused_slots"] + columns["num_reserved_slots"] + columns["num_passed_slots"]
        kept = {0, len(steps) - 1, *(int(column.argmax()) for column in columns.values())}
        num_buckets = (max_points - len(columns) - 2) // _PER_BUCKET
        for first, end in pairwise(np.linspace(0, len(steps), num_buckets + 1).astype(int).tolist()):
            for heights in (columns["num_slots"][first:end], wasted[first:end]):
                kept |= {first + int(heights.argmin()), first + int(heights.argmax())}
        return [self.at(steps[place]) for place in sorted(kept)]

    def totals(self, from_step: int = 0) -> WasteTotals:
        """Over the known steps from that one on."""
        begin = self._place_of(from_step)
        sums = {name: sum(self._columns[name][begin:]) for name in _SUMMED}
        return WasteTotals(**sums, most_requests=max(self._columns["num_requests"][begin:], default=0))

    def _place_of(self, step: int) -> int:
        """In the columns, of the first known step from that one on."""
        return max(0, step - self.steps.start)

    def _append(self, step: int, sums: KVSums) -> None:
        num_blocks = sums.num_referenced_blocks
        columns = self._columns
        columns["step"].append(step)
        columns["num_slots"].append(num_blocks * self._block_size)
        columns["num_unused_slots"].append(sums.num_unused_slots)
        columns["num_reserved_slots"].append(sums.num_reserved_slots)
        columns["num_passed_slots"].append(sums.num_passed_slots)
        columns["num_unusable_slots"].append(sums.num_unusable_slots)
        columns["num_saved_slots"].append((sums.num_references - num_blocks) * self._block_size)
        columns["num_requests"].append(len(sums.held))
