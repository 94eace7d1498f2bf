"""`LiveRun`: what a page shows of a run while it goes on, kept in memory and read as immutable snapshots.

Engine and driver threads write, any number of pages read. A page asks every second, in the interpreter of the engine: what
an answer costs depends on what is under way, never on how long the run has been going. The lock is held for assignments,
appends, plain copies and looking percentiles up.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backend.metrics.ordered_sample import OrderedSample
from backend.metrics.series import LivePoint, LiveSeries
from backend.metrics.stats import (
    FINAL_STATUSES,
    Phase,
    RequestStats,
    RunEnd,
    RunStart,
    RunStatus,
    RunSummary,
    StepStats,
    TelemetrySample,
    tpot_ms,
    ttft_ms,
)

RATE_WINDOW_S = 2.0


class Percentiles(NamedTuple):
    """Of `count` values, linearly interpolated; None where there are none."""

    count: int
    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class LiveSnapshot:
    """A run at one moment. Totals, percentiles and preemptions leave the warm-up out; gauges and rates do not."""

    run_id: int
    phase: Phase
    status: RunStatus
    start_time: float | None  # perf_counter; None until the target is ready
    elapsed_s: float  # since the run was taken up, or submitted while it waits; stops at the end
    num_requests: int  # measured ones; 0 until known
    num_finished: int
    num_failed: int
    input_tokens: int  # prompt tokens computed so far, recomputation included
    output_tokens: int
    input_tok_s: float | None  # over the last 2 s; None before the first step
    output_tok_s: float | None
    num_running: int
    num_waiting: int
    num_referenced_blocks: int
    num_evictable_blocks: int
    num_free_blocks: int
    weights_bytes: int | None
    kv_cache_bytes: int | None
    rest_bytes: int | None  # device memory (resident set on the CPU) beyond weights and KV cache
    ttft_ms: Percentiles  # of the finished requests and, so far, of those under way
    tpot_ms: Percentiles
    preemptions: int
    series: tuple[LivePoint, ...]
    notices: tuple[str, ...]
    error: str | None
    summary: RunSummary | None


class UnderWay(NamedTuple):
    """Requests that have been sent and have not ended."""

    num_requests: int  # warm-up included
    ttft_ms: list[float]  # of the measured ones that have their first token
    tpot_ms: list[float]  # so far, of the measured ones that have their second


class LiveRun:
    """A `StatsSink` that keeps one run's latest state. Thread-safe.

    Args:
        run_id: as in the database.
        num_requests: measured requests, 0 while unknown; `on_run_start` says it for certain.
        in_flight: the requests under way; asked at each snapshot, so that following them costs the engine nothing.
        clock: `time.perf_counter`, or a test's.
    """

    def __init__(
        self,
        run_id: int,
        num_requests: int = 0,
        in_flight: Callable[[], UnderWay] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.run_id = run_id
        self._in_flight = in_flight
        self._clock = clock
        self._lock = threading.Lock()
        self._created = clock()
        self._taken_up: float | None = None
        self._num_requests = num_requests
        self._phase = Phase("queued")
        self._status: RunStatus = "queued"
        self._start: RunStart | None = None
        self._measured_from: float | None = None
        self._end: RunEnd | None = None
        self._step: StepStats | None = None
        self._sample: TelemetrySample | None = None
        self._first_step_start: float | None = None
        self._recent: deque[tuple[float, int, int]] = deque()  # end_time, input and output tokens of the last steps
        self._num_finished = self._num_failed = 0
        self._input_tokens = self._output_tokens = self._preemptions = 0
        self._ttft, self._tpot = OrderedSample(), OrderedSample()
        self._series = LiveSeries()

    def on_phase(self, phase: Phase) -> None:
        with self._lock:
            self._phase = phase
            if phase.name == "running" and self._measured_from is None:
                self._measured_from = self._clock()
            if self._status not in FINAL_STATUSES:
                self._status = _status_in(phase)
            if self._taken_up is None and phase.name != "queued":
                self._taken_up = self._clock()

    def on_run_start(self, start: RunStart) -> None:
        with self._lock:
            self._start = start
            self._num_requests = start.num_requests

    def on_step(self, stats: StepStats) -> None:
        with self._lock:
            if self._start is None:
                return
            self._step = stats
            if self._first_step_start is None:
                self._first_step_start = stats.start_time
            self._recent.append((stats.end_time, stats.num_prefill_tokens, stats.num_output_tokens))
            while self._recent[0][0] <= stats.end_time - RATE_WINDOW_S:
                self._recent.popleft()
            self._series.add(stats, stats.end_time - self._start.start_time)
            if self._measured_from is not None and stats.start_time >= self._measured_from:
                self._input_tokens += stats.num_prefill_tokens
                self._output_tokens += stats.num_output_tokens
                self._preemptions += stats.num_preempted

    def on_request_finished(self, stats: RequestStats) -> None:
        if stats.warmup:
            return
        ttft, tpot = ttft_ms(stats), tpot_ms(stats)
        with self._lock:
            if stats.status == "failed":
                self._num_failed += 1
            if stats.status != "finished":
                return
            self._num_finished += 1
            if ttft is not None:
                self._ttft.add(ttft)
            if tpot is not None:
                self._tpot.add(tpot)

    def on_chunk(self, kind: str, encode: Callable[[], bytes], first_step: int, last_step: int) -> None:
        """Ledgers are for the database only."""

    def on_sample(self, sample: TelemetrySample) -> None:
        with self._lock:
            self._sample = sample

    def on_run_end(self, end: RunEnd) -> None:
        with self._lock:
            self._end = end
            self._status = end.status

    @property
    def ended(self) -> bool:
        return self._end is not None

    def snapshot(self) -> LiveSnapshot:
        """The state now; what is shown after the end is the state at the end."""
        # First, so that a request which ends meanwhile is there, if twice for one look.
        under_way = self._in_flight() if self._in_flight and not self.ended else None
        ttft_so_far, tpot_so_far = (sorted(under_way.ttft_ms), sorted(under_way.tpot_ms)) if under_way else ([], [])
        with self._lock:
            start, end, step, sample = self._start, self._end, self._step, self._sample
            if end is not None:
                under_way, ttft_so_far, tpot_so_far = None, [], []
            now = end.end_time if end else self._clock()
            start_time = start.start_time if start else None
            if start_time is not None and step is not None:
                self._series.advance(now - start_time)
            phase, status = self._phase, self._status
            num_requests, num_finished, num_failed = self._num_requests, self._num_finished, self._num_failed
            input_tokens, output_tokens, preemptions = self._input_tokens, self._output_tokens, self._preemptions
            ttft, tpot = _percentiles(self._ttft, ttft_so_far), _percentiles(self._tpot, tpot_so_far)
            recent, series = tuple(self._recent), self._series.points()
        # A step counts blocks while it runs; with nothing left running they have all been given back.
        given_back = step.num_referenced_blocks if step and (end or step.num_running == 0) else 0
        input_tok_s, output_tok_s = _rates(recent, self._first_step_start, now)
        num_running, num_waiting = (step.num_running, step.num_waiting) if step and end is None else (0, 0)
        if under_way:
            # The newest step says what ran when it ended; requests that came since wait for the next one.
            num_running = min(num_running, under_way.num_requests)
            num_waiting = under_way.num_requests - num_running
        return LiveSnapshot(
            run_id=self.run_id,
            phase=phase,
            status=status,
            start_time=start_time,
            elapsed_s=max(0.0, now - (self._taken_up or self._created)),
            num_requests=num_requests,
            num_finished=num_finished,
            num_failed=num_failed,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            input_tok_s=input_tok_s,
            output_tok_s=output_tok_s,
            num_running=num_running,
            num_waiting=num_waiting,
            num_referenced_blocks=step.num_referenced_blocks - given_back if step else 0,
            num_evictable_blocks=step.num_evictable_blocks if step else 0,
            num_free_blocks=step.num_free_blocks + given_back if step else 0,
            weights_bytes=sample.weights_bytes if sample else None,
            kv_cache_bytes=sample.kv_cache_bytes if sample else None,
            rest_bytes=_rest_bytes(sample),
            ttft_ms=ttft,
            tpot_ms=tpot,
            preemptions=preemptions,
            series=series,
            notices=start.notices if start else (),
            error=end.error if end else None,
            summary=end.summary if end else None,
        )


def _status_in(phase: Phase) -> RunStatus:
    if phase.name == "queued":
        return "queued"
    return "loading" if phase.name in ("pulling", "loading") else "running"


def _percentiles(sample: OrderedSample, so_far: Sequence[float]) -> Percentiles:
    p50, p99 = sample.percentiles((0.5, 0.99), so_far)
    return Percentiles(len(sample) + len(so_far), p50, p99)


def _rates(
    recent: tuple[tuple[float, int, int], ...], first_step_start: float | None, now: float
) -> tuple[float | None, float | None]:
    """Input and output tokens per second over the window that ends now, shorter while the run is younger."""
    if first_step_start is None:
        return None, None
    window = min(RATE_WINDOW_S, now - first_step_start)
    if window <= 0:
        return None, None
    inside = [(tokens_in, tokens_out) for end, tokens_in, tokens_out in recent if end > now - window]
    return sum(tokens for tokens, _ in inside) / window, sum(tokens for _, tokens in inside) / window


def _rest_bytes(sample: TelemetrySample | None) -> int | None:
    if sample is None:
        return None
    used = sample.host_memory_bytes if sample.device_memory_bytes is None else sample.device_memory_bytes
    return max(0, used - (sample.weights_bytes or 0) - (sample.kv_cache_bytes or 0))
