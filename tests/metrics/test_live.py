"""The live view on a clock of the test's own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from backend.metrics.live import LiveRun, Percentiles, UnderWay
from backend.metrics.series import MAX_POINTS, LiveSeries
from backend.metrics.stats import Phase, RunEnd, RunStart, StepStats, TelemetrySample, ttft_ms
from tests.metrics.test_stats import decode, failed, make_request
from tests.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(end: float, out: int = 2, prefill: int = 0, running: int = 2, preempted: int = 0) -> StepStats:
    return StepStats(0, end, 50.0, 1, 48, 1, running, prefill, out, out, running, 3, preempted, 6, 1, 3)


def start(at: float, num_requests: int = 4) -> RunStart:
    return RunStart(at, {}, {}, {}, ("a notice",), {"state": "cold", "num_cached_tokens": 0}, num_requests)


def test_from_queued_to_finished():
    clock = Clock()
    live = LiveRun(12, 0, clock=clock)
    clock.now = 103.0
    queued = live.snapshot()
    assert (queued.run_id, queued.status, queued.phase, queued.start_time) == (12, "queued", Phase("queued"), None)
    assert queued.elapsed_s == pytest.approx(3)
    assert queued.output_tok_s is None
    live.on_phase(Phase("pulling", 34, 98, "bytes"))
    assert live.snapshot().status == "loading"
    live.on_phase(Phase("loading"))
    live.on_run_start(start(103.0))
    live.on_phase(Phase("running", 0, 4))
    clock.now = 104.0
    running = live.snapshot()
    assert (running.status, running.num_requests, running.notices) == ("running", 4, ("a notice",))
    assert running.elapsed_s == pytest.approx(1), "since it was taken up"
    live.on_run_end(RunEnd("failed", 105.0, error="it broke"))
    clock.now = 500.0
    ended = live.snapshot()
    assert (ended.status, ended.error) == ("failed", "it broke")
    assert ended.elapsed_s == pytest.approx(2)
    live.on_phase(Phase("writing"))
    assert live.snapshot().status == "failed"


def test_warmup_is_shown_but_not_counted():
    clock = Clock()
    live = LiveRun(1, 4, clock=clock)
    live.on_run_start(start(100.0))
    live.on_phase(Phase("warming up", 0, 1))
    live.on_step(step(100.1, out=1, prefill=30, preempted=1))
    live.on_request_finished(make_request([9.0], [1], warmup=True))
    clock.now = 101.0
    live.on_phase(Phase("running", 0, 4))
    live.on_step(step(101.2, out=2, prefill=40))
    clock.now = 101.2
    shown = live.snapshot()
    assert (shown.input_tokens, shown.output_tokens, shown.preemptions) == (40, 2, 0)
    assert shown.num_finished == 0
    assert shown.ttft_ms.count == 0
    assert (shown.num_running, shown.num_waiting) == (2, 3)
    assert (shown.num_referenced_blocks, shown.num_evictable_blocks, shown.num_free_blocks) == (6, 1, 3)


def test_rates_are_over_two_seconds_and_fall_in_a_stall():
    clock = Clock()
    live = LiveRun(1, 4, clock=clock)
    live.on_run_start(start(100.0))
    live.on_phase(Phase("running", 0, 4))
    for index in range(1, 101):  # 5 s of 20 steps a second, the first 2 s five times as fast
        live.on_step(step(100 + index * 0.05, out=10 if index <= 40 else 2, prefill=1))
    clock.now = 105.0
    assert live.snapshot().output_tok_s == pytest.approx(40)
    assert live.snapshot().input_tok_s == pytest.approx(20)
    clock.now = 106.0
    assert live.snapshot().output_tok_s == pytest.approx(20)
    clock.now = 110.0
    assert live.snapshot().output_tok_s == 0


def test_rates_of_a_young_run_are_over_its_age():
    clock = Clock()
    live = LiveRun(1, 4, clock=clock)
    live.on_run_start(start(100.0))
    live.on_step(step(100.05, out=4))
    clock.now = 100.1
    assert live.snapshot().output_tok_s == pytest.approx(40)


def test_requests_and_memory():
    live = LiveRun(1, 4, clock=Clock())
    live.on_run_start(start(100.0))
    for request in (decode(11), decode(1), failed()):
        live.on_request_finished(request)
    live.on_sample(TelemetrySample(100.0, 1000, None, 300, 200, None, None, None))
    shown = live.snapshot()
    assert (shown.num_finished, shown.num_failed) == (2, 1)
    assert shown.ttft_ms.count == 2
    assert shown.tpot_ms.count == 1
    assert shown.tpot_ms.p50 == pytest.approx(10)
    assert (shown.weights_bytes, shown.kv_cache_bytes, shown.rest_bytes) == (300, 200, 500)
    live.on_sample(TelemetrySample(100.0, 1000, 450, 300, 200, None, None, None))
    assert live.snapshot().rest_bytes == 0


@pytest.mark.parametrize("duration_s", [1.0, 70.0, 80.0, 1000.0, 36_000.0])
def test_series_stays_short_and_loses_no_tokens(duration_s: float):
    series = LiveSeries()
    steps = 2000
    for index in range(steps):
        series.add(step(0, out=3), duration_s * (index + 0.5) / steps)
    series.advance(2 * duration_s)
    points = series.points()
    assert len(points) <= MAX_POINTS
    interval = points[0].time_s
    assert [point.time_s for point in points] == pytest.approx([interval * (i + 1) for i in range(len(points))])
    assert sum(point.output_tok_s for point in points) * interval == pytest.approx(3 * steps)
    assert points[-1].output_tok_s == 0
    assert points[0].kv_cache_usage == pytest.approx(0.6)


def test_a_stall_shows_in_the_series_before_the_next_step():
    clock = Clock()
    live = LiveRun(1, 4, clock=clock)
    live.on_run_start(start(100.0))
    live.on_step(step(100.1))
    clock.now = 103.0
    points = live.snapshot().series
    assert len(points) == 12
    assert [point.output_tok_s for point in points] == [8.0] + [0.0] * 11


def test_percentiles_are_of_the_finished_and_of_those_under_way_until_the_run_ends():
    under_way = UnderWay(3, [300.0, 100.0], [40.0])
    live = LiveRun(1, 4, lambda: under_way, clock=Clock())
    live.on_run_start(start(100.0))
    assert live.snapshot().ttft_ms == Percentiles(2, 200.0, pytest.approx(298.0))
    assert live.snapshot().tpot_ms == Percentiles(1, 40.0, 40.0)
    finished = decode(11)
    live.on_request_finished(finished)
    shown = live.snapshot()
    values = [300.0, 100.0, ttft_ms(finished)]
    assert shown.ttft_ms == Percentiles(3, *(pytest.approx(np.percentile(values, share)) for share in (50, 99)))
    live.on_run_end(RunEnd("finished", 105.0))
    ended = live.snapshot()
    assert ended.ttft_ms.count == 1
    assert ended.ttft_ms.p50 == pytest.approx(ttft_ms(finished))
    assert (ended.num_running, ended.num_waiting) == (0, 0)


def test_nothing_to_show_is_none():
    assert LiveRun(1).snapshot().ttft_ms == Percentiles(0, None, None)


def instructions(function: Callable[[], object]) -> int:
    """How many Python instructions a call runs, in all that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_a_snapshot_costs_the_same_however_long_the_run_has_been():
    """2,000 requests and 20,000 steps against a fiftieth of it; the last two seconds hold the same number of steps."""

    def cost(num_requests: int, num_steps: int) -> int:
        clock = Clock()
        live = LiveRun(1, num_requests, lambda: UnderWay(2, [5.0, 4.0], [1.0, 2.0]), clock=clock)
        live.on_run_start(start(100.0))
        live.on_phase(Phase("running"))
        for index in range(num_steps):
            live.on_step(step(100.0 + index / 50))
        for _ in range(num_requests):
            live.on_request_finished(request)
        clock.now = 100.0 + num_steps / 50
        live.snapshot()  # closes the intervals since the last look
        clock.now += 0.01
        return instructions(live.snapshot)

    request = decode(3)
    assert cost(2000, 20_000) < 1.2 * cost(40, 400)


def test_readers_and_writers_at_once():
    live = LiveRun(1, 1000)
    live.on_run_start(start(0.0))
    live.on_phase(Phase("running", 0, 1000))
    seen: list[list[tuple[int, int]]] = [[], []]  # requests finished, and those of them with a time to the first token
    stop = threading.Event()

    def read(counts: list[tuple[int, int]]) -> None:
        while not stop.is_set():
            shown = live.snapshot()
            counts.append((shown.num_finished, shown.ttft_ms.count))

    readers = [threading.Thread(target=read, args=(counts,)) for counts in seen]
    for reader in readers:
        reader.start()
    for index in range(1000):
        live.on_request_finished(decode(2))
        if index % 100 == 50:  # both look in between, however the threads take turns
            looks = [len(counts) for counts in seen]
            until(lambda looks=looks: all(len(counts) > before for counts, before in zip(seen, looks, strict=True)))
    stop.set()
    for reader in readers:
        reader.join()
    for counts in seen:
        assert counts == sorted(counts)
        assert all(finished == timed for finished, timed in counts)
    last = live.snapshot()
    assert (last.num_finished, last.ttft_ms.count) == (1000, 1000)
