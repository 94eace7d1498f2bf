"""`LedgerReader`: a run's step ledger, from its stored chunks: any step, and the KV blocks as they were in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from backend.core.block_events import PoolState
from backend.errors import DatabaseError
from backend.metrics.block_map import BlockMap
from backend.metrics.ledger_format import LedgerSegment, LedgerStep, read_chunk

CHUNKS_KEPT = 64  # decoded, for whoever scrubs back and forth

Chunk = tuple[bytes, int, int]  # data, first step, last step


class LedgerReader:
    """Args:
    chunks: of kind `ledger.LEDGER_KIND`, in order of step.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._first_steps = [first for _, first, _ in chunks]
        self._segment = lru_cache(CHUNKS_KEPT)(self._read)

    def longer(self, chunks: Sequence[Chunk]) -> LedgerReader:
        """The same ledger with chunks that have come behind it."""
        return LedgerReader([*self._chunks, *chunks])

    @property
    def steps(self) -> range:
        """Numbers of the steps that there are; a run that was killed lacks its last ones."""
        return range(self._first_steps[0], self._chunks[-1][2] + 1) if self._chunks else range(0)

    @property
    def gaps(self) -> list[str]:
        """What is missing between steps, or before them, or there twice, each in words: "steps 3 to 9 are missing"."""
        ends = [0, *(last + 1 for _, _, last in self._chunks)]
        found = (break_between(end, first) for end, first in zip(ends, self._first_steps, strict=False))
        return [words for words in found if words is not None]

    def step(self, number: int) -> LedgerStep:
        """Raises `DatabaseError` for a step that is not in the ledger, or in a damaged chunk."""
        index = self._chunk_of(number)
        return self._segment(index).steps[number - self._first_steps[index]]

    def read(self, first: int, last: int) -> Iterator[LedgerStep]:
        """Steps `first` to `last`, as far as there are."""
        for number in range(max(first, self.steps.start), min(last + 1, self.steps.stop)):
            yield self.step(number)

    def since_key_frame(self, number: int) -> tuple[PoolState, list[LedgerStep]] | None:
        """The last key frame up to step `number`, with its step and those behind it up to that one.

        None in a ledger that was written before there were events. Decodes each chunk from there on once. Raises
        `DatabaseError` as `step`.
        """
        at = self._chunk_of(number)
        segments: list[LedgerSegment] = []
        for index in range(at, -1, -1):
            if index < at:
                self._check_break(self._chunks[index][2] + 1, self._first_steps[index + 1])
            segments.append(self._segment(index))
            frame = segments[-1].key_frame
            if frame is not None:
                steps = [step for segment in reversed(segments) for step in segment.steps]
                return frame, steps[: number - self._first_steps[index] + 1]
        self._check_break(0, self._first_steps[0])
        return None

    def block_map(self, number: int) -> BlockMap | None:
        """The pool when step `number` was handed to the worker; None and `DatabaseError` as `since_key_frame`."""
        found = self.since_key_frame(number)
        if found is None:
            return None
        frame, (_, *steps) = found
        block_map = BlockMap(frame)
        for step in steps:
            block_map.apply(step.events)
        return block_map

    def _chunk_of(self, number: int) -> int:
        if number not in self.steps:
            there_are = f"{self.steps.start:,} to {self.steps.stop - 1:,}" if self.steps else "none"
            raise DatabaseError(f"step {number:,} is not in the step ledger; steps: {there_are}")
        index = bisect_right(self._first_steps, number) - 1
        end = self._chunks[index][2] + 1
        if number >= end:
            self._check_break(end, self._first_steps[index + 1])
        elif index and number <= self._chunks[index - 1][2]:
            self._check_break(self._chunks[index - 1][2] + 1, self._first_steps[index])
        return index

    @staticmethod
    def _check_break(end: int, first: int) -> None:
        if words := break_between(end, first):
            raise DatabaseError(f"the step ledger is damaged: {words}")

    def _read(self, index: int) -> LedgerSegment:
        return read_stored(self._chunks[index])


def read_stored(chunk: Chunk) -> LedgerSegment:
    """One chunk. Raises `DatabaseError` as `read_chunk`, and for one that does not hold the steps that it is stored as."""
    data, first, last = chunk
    segment = read_chunk(data)
    steps = segment.steps
    if len(steps) != last - first + 1 or any(step.step != number for number, step in enumerate(steps, first)):
        raise DatabaseError(
            f"the step ledger is damaged: what is stored as steps {first:,} to {last:,} holds other ones"
        )
    return segment


def break_between(end: int, first: int) -> str | None:
    """In words, what is wrong between a chunk that ends before step `end` and one that begins with `first`; None: nothing."""
    if first == end:
        return None
    missing = first > end
    begin, last = (end, first - 1) if missing else (first, end - 1)
    what = "missing" if missing else "there twice"
    return f"step {begin:,} is {what}" if begin == last else f"steps {begin:,} to {last:,} are {what}"


def step_to_dict(step: LedgerStep) -> dict[str, Any]:
    """Plain data for JSON."""
    return {
        "step": step.step,
        "requests": [entry._asdict() for entry in step.entries],
        "events": [event._asdict() for event in step.events],
    }
