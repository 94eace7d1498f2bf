"""Drives a `Target` with a workload and builds the records of its requests.

An open loop sends every request at its planned time, however far the target is behind. A closed loop sends the next request
at the moment an earlier one ended, and a further turn of a conversation follows the answer before it. A request's
`arrival_time` is that planned moment and not the moment of sending, so whatever waiting there is, here or in the target,
counts as queueing.

With `sampling.n` above 1 each sample of a prompt is a request with a record of its own. The prompt is over, for a closed
loop's place, when the last of them is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

from backend.errors import EngineError, ServeLabError
from backend.experiments.flight import Flight, flights_of
from backend.metrics.stats import Phase, RequestStats, StatsSink
from backend.workload.datasets import WorkloadRequest
from backend.workload.schedule import Schedule
from backend.workload.spec import ClosedLoop, Workload
from backend.workload.targets import StreamEvent, Target

POLL_S = 0.1  # how soon a cancel is seen
REPORT_S = 0.1  # between two progress reports
ABORT_TIMEOUT_S = 10.0  # how long a cancelled run waits for the last events of its requests
FAILURE_TIMEOUT_S = 1.0  # the same when the target has failed, which may have told only some of them


_Ended = tuple[WorkloadRequest, RequestStats]


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """How a workload went.

    `finished`: all requests ended and one at least succeeded; where others failed, say by logits that are not finite,
    `error` counts them and quotes the first. `failed`: no request succeeded (`error` quotes the first), or the target
    could not go on (`error` says why). A turn that failed ends its conversation: the rest is not sent and has no record.
    `cancelled`: `cancel` was set before the last request ended.
    """

    status: Literal["finished", "failed", "cancelled"]
    error: str | None
    requests: tuple[RequestStats, ...]  # in the order in which they ended, warm-up included


def run_workload(
    workload: Workload,
    target: Target,
    sink: StatsSink,
    *,
    warmup: Sequence[WorkloadRequest],
    requests: Sequence[WorkloadRequest],
    cancel: threading.Event,
    name: str = "run",
    in_flight: dict[str, Flight] | None = None,
    target_failure: Callable[[], str | None] = lambda: None,
    after_warmup: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[float], object] | None = None,
) -> WorkloadResult:
    """Run the warm-up, then the measured requests; returns when all have ended, or within seconds after `cancel`.

    Args:
        workload: for its arrivals.
        target: serves the requests.
        sink: gets phases ("warming up", "running" n of N) and every request's record as it ends.
        warmup: sent at once, waited for, flagged.
        requests: sent as `workload.arrivals` says.
        cancel: aborts what is in flight and waits for it.
        name: start of all request ids, which must be unlike those of other users of the target: `name-3` for the request
            of index 3, `name-3/1` for its second sample, `name-c0-t2` for the third turn of the first conversation,
            `name-warmup-0`.
        in_flight: where to keep the requests that have been sent and have not ended, for somebody who watches.
        target_failure: why the target will deliver nothing more, or None; asked while nothing ends.
        after_warmup: called when the warm-up is over and nothing is in flight, before the first measured request.
        clock: `time.perf_counter` unless a test has its own.
        wait: called with seconds in place of blocking until a request ends, for a test's clock to move on in.
    """
    driver = _Driver(target, sink, cancel, name, {} if in_flight is None else in_flight, target_failure, clock, wait)
    try:
        if warmup:
            driver.drive("warming up", warmup, warmup=True)
        if warmup and not driver.must_stop:
            after_warmup()
        if not driver.must_stop:
            concurrency = workload.arrivals.concurrency if isinstance(workload.arrivals, ClosedLoop) else None
            driver.drive("running", requests, concurrency=concurrency)
    finally:
        driver.abort_all()
    return driver.result()


class _Driver:
    def __init__(
        self,
        target: Target,
        sink: StatsSink,
        cancel: threading.Event,
        name: str,
        in_flight: dict[str, Flight],
        target_failure: Callable[[], str | None],
        clock: Callable[[], float],
        wait: Callable[[float], object] | None,
    ) -> None:
        self._target = target
        self._sink = sink
        self._cancel = cancel
        self._name = name
        self._target_failure = target_failure
        self._clock = clock
        self._wait = wait
        self._in_flight = in_flight
        self._ended: SimpleQueue[Flight] = SimpleQueue()
        self._open_samples: Counter[str] = Counter()  # of each prompt that was sent and is not over
        self._stats: list[RequestStats] = []
        self._failure: str | None = None
        self._num_given_up = 0  # measured turns that had no answer to go on from
        self._complete = False  # all measured requests have been sent and have ended

    def drive(
        self, phase: str, requests: Sequence[WorkloadRequest], *, warmup: bool = False, concurrency: int | None = None
    ) -> None:
        """Send the requests as they fall due and record them as they end, until all have or the run must stop."""
        progress = _Progress(self._sink, self._clock, phase, sum(request.sampling.n for request in requests))
        schedule = Schedule(requests, self._clock(), concurrency)
        while not self.must_stop and (schedule.num_left or self._in_flight):
            due = schedule.due()
            if due is not None and due <= self._clock():
                ended = self._send(*schedule.take(), warmup)
            else:
                ended = self._next_end(POLL_S if due is None else min(POLL_S, due - self._clock()))
            for request, stats in ended:
                given_up = schedule.end(request, stats) if self._is_over(stats) else 0
                self._num_given_up += given_up
                progress.add(given_up)
            if not ended:
                progress.catch_up()
        if not warmup:
            self._complete = not schedule.num_left and not self._in_flight

    def abort_all(self) -> None:
        """Abort what is in flight; what does not end in time is recorded as it stands."""
        for request_id in list(self._in_flight):
            self._target.abort(request_id)
        deadline = self._clock() + (ABORT_TIMEOUT_S if self._failure is None else FAILURE_TIMEOUT_S)
        while self._in_flight and self._clock() < deadline:
            self._next_end(POLL_S)
        for flight in self._in_flight.values():
            reason = "abort" if self._failure is None else "error"
            self._record(flight.end(self._clock(), reason, self._failure))
        self._in_flight.clear()

    def result(self) -> WorkloadResult:
        measured = [stats for stats in self._stats if not stats.warmup]
        failed = [stats for stats in measured if stats.status == "failed"]
        requests = tuple(self._stats)
        if self._failure is not None:
            return WorkloadResult("failed", self._failure, requests)
        if not self._complete:
            return WorkloadResult("cancelled", None, requests)
        if failed and not any(stats.status == "finished" for stats in measured):
            return WorkloadResult("failed", failed[0].error, requests)
        error = None
        if failed:
            unsent = f", {self._num_given_up} later turns were not sent" if self._num_given_up else ""
            error = f"{len(failed)} of {len(measured)} requests failed{unsent}; the first: {failed[0].error}"
        return WorkloadResult("finished", error, requests)

    @property
    def must_stop(self) -> bool:
        return self._cancel.is_set() or self._failure is not None

    def _is_over(self, stats: RequestStats) -> bool:
        """Whether the prompt of a request that has ended has no other sample under way."""
        prompt_id = stats.parent_id or stats.request_id
        self._open_samples[prompt_id] -= 1
        if self._open_samples[prompt_id]:
            return False
        del self._open_samples[prompt_id]
        return True

    def _send(self, request: WorkloadRequest, arrival_time: float, warmup: bool) -> list[_Ended]:
        """Submit a request; itself and its records when it is refused at once."""
        request_id = f"{self._name}-{_place(request, warmup)}"
        flights = flights_of(request_id, request, arrival_time, self._ended, warmup=warmup)
        self._open_samples[request_id] = len(flights)
        try:
            self._target.submit(
                request_id, request.prompt, request.sampling, _listener(flights), arrival_time, request.priority
            )
        except ServeLabError as error:
            if isinstance(error, EngineError):
                self._failure = str(error)
            now = self._clock()
            return [(request, self._record(flight.end(now, "error", str(error)))) for flight in flights.values()]
        self._in_flight |= flights
        return []

    def _next_end(self, timeout: float) -> list[_Ended]:
        """Wait for a request to end; itself and its record, or nothing when none did in time."""
        try:
            if self._wait is None:
                flight = self._ended.get(timeout=max(0.0, timeout))
            else:
                if self._ended.empty():
                    self._wait(max(0.0, timeout))
                flight = self._ended.get_nowait()
        except Empty:
            failure = self._target_failure() if self._in_flight and self._failure is None else None
            # Asked in this order: a target may have delivered ends and died since the wait.
            if failure is not None and self._ended.empty():
                self._failure = failure
            return []
        del self._in_flight[flight.request_id]
        return [(flight.request, self._record(flight.stats()))]

    def _record(self, stats: RequestStats) -> RequestStats:
        self._stats.append(stats)
        self._sink.on_request_finished(stats)
        return stats


class _Progress:
    """Reports a phase's progress: at once at both ends, and not more often than a page could show between them."""

    def __init__(self, sink: StatsSink, clock: Callable[[], float], phase: str, total: int) -> None:
        self._sink = sink
        self._clock = clock
        self._phase = phase
        self._total = total
        self._done = 0
        self._report()

    def add(self, given_up: int) -> None:
        """One more is done, and so many need no longer be."""
        self._done += 1
        self._total -= given_up
        if self._done == self._total:
            self._report()
        else:
            self.catch_up()

    def catch_up(self) -> None:
        """Report what was held back, if it is time."""
        if self._done != self._reported and self._clock() - self._reported_at >= REPORT_S:
            self._report()

    def _report(self) -> None:
        self._reported, self._reported_at = self._done, self._clock()
        self._sink.on_phase(Phase(self._phase, self._done, self._total))


def _listener(flights: Mapping[str, Flight]) -> Callable[[StreamEvent], None]:
    if len(flights) == 1:
        return next(iter(flights.values())).on_event
    return lambda event: flights[event.request_id].on_event(event)


def _place(request: WorkloadRequest, warmup: bool) -> str:
    if request.turn is not None:
        return f"c{request.turn.conversation}-t{request.turn.number}"
    return f"warmup-{request.index}" if warmup else str(request.index)
