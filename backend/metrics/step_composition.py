"""What every step of a run was made of, and when it ran: columns that grow with the ledger. No torch, no database."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from backend.metrics.ledger_format import STEP_KINDS, LedgerStep

_CODES = {kind: code for code, kind in enumerate(STEP_KINDS)}


class StepBucket(NamedTuple):
    """Neighbouring steps as one bar of a picture; a single step where there is room for each."""

    first_step: int
    end_step: int  # exclusive
    start: float
    end: float
    num_tokens: tuple[float, ...]  # mean of its steps, by kind in the order of `STEP_KINDS`
    longest_s: float  # of its steps


class StepComposition:
    """Steps are added in order, each with its time; times are seconds of one clock."""

    def __init__(self) -> None:
        self.first_step = 0
        self._starts, self._ends = array("d"), array("d")
        self._tokens = array("q")  # STEP_KINDS of them for each step
        self._requests = array("q")

    def append(self, step: LedgerStep, start: float, end: float) -> None:
        if not self._starts:
            self.first_step = step.step
        counts = [0] * len(STEP_KINDS)
        for _, num_tokens, kind in step.entries:
            counts[_CODES[kind]] += num_tokens
        self._starts.append(start)
        self._ends.append(end)
        self._tokens.extend(counts)
        self._requests.append(len(step.entries))

    @property
    def steps(self) -> range:
        return range(self.first_step, self.first_step + len(self._starts))

    @property
    def starts(self) -> np.ndarray:
        """float64 [num_steps], a copy, as the next three."""
        return np.array(self._starts)

    @property
    def ends(self) -> np.ndarray:
        return np.array(self._ends)

    @property
    def num_tokens(self) -> np.ndarray:
        """int64 [num_steps, len(STEP_KINDS)]"""
        return np.array(self._tokens, dtype=np.int64).reshape(-1, len(STEP_KINDS))

    @property
    def num_requests(self) -> np.ndarray:
        """int64 [num_steps]"""
        return np.array(self._requests, dtype=np.int64)

    def start_of(self, step: int) -> float:
        """Also of the step behind the last: the end of that one."""
        place = step - self.first_step
        return self._starts[place] if place < len(self._starts) else self._ends[-1]

    def steps_begun(self, start: float, end: float) -> range:
        """Steps that began at `start` or later and before `end`."""
        first, last = np.searchsorted(np.frombuffer(self._starts), (start, end)) if self._starts else (0, 0)
        return range(self.first_step + int(first), self.first_step + int(last))

    def steps_under_way(self, start: float, end: float) -> range:
        """Steps of which any part lies between the two times; a step lasts until the next begins."""
        if not self._starts:
            return range(0)
        starts = np.frombuffer(self._starts)
        first = max(0, int(np.searchsorted(starts, start, side="right")) - 1) if start < self._ends[-1] else len(starts)
        return range(self.first_step + first, self.first_step + max(first, int(np.searchsorted(starts, end))))

    def tokens_in(self, steps: range) -> dict[str, int]:
        """Sums over steps that there are, by kind."""
        begin, end = (max(0, step - self.first_step) * len(STEP_KINDS) for step in (steps.start, steps.stop))
        sums = np.array(self._tokens[begin:end], dtype=np.int64).reshape(-1, len(STEP_KINDS)).sum(axis=0)
        return dict(zip(STEP_KINDS, sums.tolist(), strict=True))

    def buckets(self, steps: range, max_buckets: int) -> list[StepBucket]:
        """Steps that there are, as at most so many bars of 2^n neighbours each; bars of a growing run keep their places."""
        first = max(steps.start, self.steps.start)
        last = min(steps.stop, self.steps.stop)
        if first >= last:
            return []
        width = 1
        while (last - 1) // width - first // width >= max_buckets:
            width *= 2
        bounds = [first, *range((first // width + 1) * width, last, width), last]
        begins = np.array(bounds[:-1]) - self.first_step
        sizes = np.diff(bounds)
        end = last - self.first_step
        means = np.add.reduceat(self.num_tokens[:end], begins, axis=0) / sizes[:, None]
        longest = np.maximum.reduceat((self.ends - self.starts)[:end], begins)
        return [
            StepBucket(
                begin, stop, self.start_of(begin), self._ends[stop - 1 - self.first_step], tuple(tokens), slowest
            )
            for begin, stop, tokens, slowest in zip(
                bounds[:-1], bounds[1:], means.tolist(), longest.tolist(), strict=True
            )
        ]
