"""What became of every request over time: its life cut into spans, from the step ledger and the times of its steps.

The spans of a request tile the time from its arrival to its end. What a step does to a request holds from the step's start
to the start of the next, so the moment that the host takes between two steps belongs to the first of them.

- queued: from the arrival to the first step that ran any of its tokens
- prefill, decode, recompute: a step ran so many of its tokens; neighbouring steps are one span, but for chunks of a prompt
- stalled: it had been admitted, and steps ran without it
- preempted: it had lost its blocks and waited to be admitted again; `swapped`: its blocks waited outside the pool

With asynchronous scheduling a step may run a token of a request that has just ended. Such tokens are dropped, and lie in no
span.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from backend.metrics.ledger_format import STEP_KINDS, LedgerStep
from backend.metrics.step_composition import StepComposition

SpanKind = Literal["queued", "prefill", "decode", "recompute", "stalled", "preempted", "swapped"]
SPAN_KINDS: tuple[SpanKind, ...] = get_args(SpanKind)

# Block event -> what its request does until it runs again.
_WAITS: dict[str, SpanKind] = {"preempt": "preempted", "swap_out": "swapped"}


class Span(NamedTuple):
    """Times in seconds; steps `first_step` to `end_step` (exclusive) ran it, or began while it waited."""

    kind: SpanKind
    start: float
    end: float
    first_step: int
    end_step: int
    num_tokens: int  # run in those steps; 0 while it waited

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def num_steps(self) -> int:
        return self.end_step - self.first_step

    @property
    def is_running(self) -> bool:
        return self.kind in STEP_KINDS


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    request_id: str
    arrival: float | None  # None: it has not ended, and who waits is not recorded before that
    finish: float | None  # None: it has not ended
    spans: tuple[Span, ...]  # in order, without gap or overlap
    num_dropped_tokens: int  # run after its end

    @property
    def num_preemptions(self) -> int:
        """Swapped out or not."""
        return sum(span.kind in _WAITS.values() for span in self.spans)

    @property
    def start(self) -> float:
        return self.spans[0].start

    @property
    def end(self) -> float:
        return self.spans[-1].end


@dataclass(slots=True)
class StepRun:
    """Consecutive steps in which the ledger has a request under one kind; of a wait, where it began, and no tokens."""

    kind: SpanKind
    first_step: int
    num_tokens: array[int] = field(default_factory=lambda: array("I"))  # one per step

    @property
    def end_step(self) -> int:
        return self.first_step + len(self.num_tokens)


@dataclass(slots=True)
class RunTimelines:
    """The timelines of a run, which grows as its ledger does; four bytes for each request in each step."""

    composition: StepComposition = field(default_factory=StepComposition)
    _runs: dict[str, list[StepRun]] = field(default_factory=dict)
    _freed: dict[str, int] = field(default_factory=dict)  # the step before which a request last gave back its blocks
    _has_events: bool = False

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that any step ran, in the order in which they first did."""
        return list(self._runs)

    def extend(self, steps: Iterable[LedgerStep], times: Sequence[tuple[int, float, float]]) -> None:
        """Go on with steps of which both the ledger and the times are known; stops at the first that lacks either.

        Args:
            steps: in order; those that are known already are skipped.
            times: (step, start, end).
        """
        bounds = {step: (start, end) for step, start, end in times}
        composition = self.composition
        for step in steps:
            known = composition.steps
            if known and step.step < known.stop:
                continue
            if step.step not in bounds or (known and step.step > known.stop):
                return
            composition.append(step, *bounds[step.step])
            self._add(step)

    def runs_of(self, request_id: str) -> Iterator[StepRun]:
        """The steps that ran a request, in order."""
        return (run for run in self._runs.get(request_id, ()) if run.num_tokens)

    def timeline(self, request_id: str, arrival: float | None, finish: float | None) -> RequestTimeline | None:
        """One request's; None for one of which nothing is known: no step ran it, and it has not ended.

        Args:
            arrival, finish: from its record, on the clock of the steps; None as long as there is none.
        """
        runs = self._runs.get(request_id, [])
        if not runs and (arrival is None or finish is None):
            return None
        steps = self.composition
        end = self._last_moment(request_id) if finish is None else finish
        limit = steps.steps_begun(-math.inf, end).stop
        spans: list[Span] = []
        cursor = steps.start_of(runs[0].first_step) if arrival is None else arrival
        waits: SpanKind = "queued"
        num_dropped = 0
        for place, run in enumerate(runs):
            if run.first_step >= limit:
                num_dropped += sum(run.num_tokens)
                continue
            if run.num_tokens and waits == "stalled" and self._was_preempted(runs, place):
                waits = "preempted"
            begin = steps.start_of(run.first_step)
            if begin > cursor:
                spans.append(self._wait(waits, cursor, begin))
                cursor = begin
            waits = run.kind
            if run.num_tokens:
                num_steps = min(run.end_step, limit) - run.first_step
                until = max(cursor, min(end, steps.start_of(run.first_step + num_steps)))
                num_tokens = sum(run.num_tokens[:num_steps])
                num_dropped += sum(run.num_tokens[num_steps:])
                spans.append(Span(run.kind, cursor, until, run.first_step, run.first_step + num_steps, num_tokens))
                cursor, waits = until, "stalled"
        if end > cursor:
            spans.append(self._wait(waits, cursor, end))
        return RequestTimeline(request_id, arrival, finish, tuple(spans), num_dropped) if spans else None

    def _add(self, step: LedgerStep) -> None:
        number = step.step
        self._has_events |= bool(step.events)
        for event in step.events:
            if event.request_id not in self._runs:
                continue
            if event.kind in _WAITS:
                self._runs[event.request_id].append(StepRun(_WAITS[event.kind], number))
            elif event.kind == "free":
                self._freed[event.request_id] = number
        for request_id, num_tokens, kind in step.entries:
            runs = self._runs.setdefault(request_id, [])
            if not runs or kind == "prefill" or runs[-1].kind != kind or runs[-1].end_step != number:
                runs.append(StepRun(kind, number))
            runs[-1].num_tokens.append(num_tokens)

    def _last_moment(self, request_id: str) -> float:
        """Of a request without a record: that of the ledger so far, or when it had given back its blocks for good."""
        steps = self.composition
        ran_until = self._runs[request_id][-1].end_step
        has_ended = self._freed.get(request_id, -1) >= ran_until
        return steps.start_of(ran_until if has_ended else steps.steps.stop)

    def _was_preempted(self, runs: Sequence[StepRun], place: int) -> bool:
        """Ledgers of format 1 have no events; there, who computes again after having got further has been preempted."""
        return not self._has_events and runs[place].kind == "recompute" and runs[place - 1].kind != "recompute"

    def _wait(self, kind: SpanKind, start: float, end: float) -> Span:
        steps = self.composition.steps_begun(start, end)
        return Span(kind, start, end, steps.start, steps.stop, 0)
