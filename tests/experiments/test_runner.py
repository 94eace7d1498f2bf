"""The driver against a target in virtual time, where every arrival, delivery and end is known beforehand."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from backend.errors import EngineError, RequestError
from backend.experiments.flight import Flight, under_way
from backend.experiments.runner import ABORT_TIMEOUT_S, WorkloadResult, run_workload
from backend.metrics.sinks import PeakSink
from backend.metrics.stats import Phase, RequestStats, e2el_ms, queue_ms, tpot_ms, ttft_ms
from backend.metrics.summary import summarize
from backend.sampling_params import SamplingParams
from backend.workload.datasets import build_requests, build_warmup_requests
from backend.workload.spec import Workload
from backend.workload.targets import Prompt, StreamEvent
from tests.experiments.simulated_target import Plan, SimulatedTarget, tokens


class Sink(PeakSink):
    def __init__(self) -> None:
        super().__init__()
        self.phases: list[Phase] = []
        self.requests: list[RequestStats] = []

    def on_phase(self, phase: Phase) -> None:
        self.phases.append(phase)

    def on_request_finished(self, stats: RequestStats) -> None:
        self.requests.append(stats)


def workload(count: int = 6, warmup: int = 0, output_len: int = 8, **arrivals: Any) -> Workload:
    return Workload.from_dict(
        {
            "source": {"kind": "prompts", "prompts": [f"prompt {index}" for index in range(count)]},
            "arrivals": arrivals or {"kind": "all_at_once"},
            "output_len": output_len,
            "warmup_requests": warmup,
        }
    )


def run(
    target: SimulatedTarget,
    spec: Workload,
    sink: Sink | None = None,
    cancel: threading.Event | None = None,
    **options: Any,
) -> WorkloadResult:
    return run_workload(
        spec,
        target,
        sink or Sink(),
        warmup=build_warmup_requests(spec, None),
        requests=build_requests(spec, None),
        cancel=cancel or threading.Event(),
        clock=target.clock,
        wait=target.wait,
        **options,
    )


def by_index(result: WorkloadResult) -> list[RequestStats]:
    return sorted((stats for stats in result.requests if not stats.warmup), key=lambda stats: stats.index)


def always(plan: Plan) -> Any:
    return lambda request_id, prompt, sampling: plan


def test_records_say_what_was_delivered():
    plan = Plan([(0.1, 3, "ab"), (0.05, 1, ""), (0.02, 0, "c"), (0.03, 4, "d"), (0.5, 0, "")], "stop")
    result = run(SimulatedTarget(always(plan)), workload(1), name="run7")
    (stats,) = result.requests
    assert (result.status, result.error) == ("finished", None)
    assert (stats.request_id, stats.index, stats.warmup, stats.status) == ("run7-0", 0, False, "finished")
    assert stats.finish_reason == "stop"
    assert stats.emission_times == pytest.approx((50.1, 50.15, 50.2))  # a delivery without tokens is none
    assert stats.emission_tokens == (3, 1, 4)
    assert stats.num_output_tokens == len(stats.token_ids or ()) == 8
    assert stats.text == "abcd"
    assert stats.finish_time == pytest.approx(50.7)
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_preemptions) == (7, 0, 0)
    assert (stats.prompt, stats.error) == ("prompt 0", None)
    assert ttft_ms(stats) == pytest.approx(100)
    assert tpot_ms(stats) == pytest.approx(100 / 7)


def test_open_loop_never_waits_for_ends():
    """One request served at a time, each takes 1 s, four arrive per second: waiting counts from the planned arrival."""
    target = SimulatedTarget(always(tokens(1, first=1.0)), capacity=1)
    result = run(target, workload(6, kind="constant", rate=4.0))
    stats = by_index(result)
    assert [s.arrival_time for s in stats] == pytest.approx([50 + 0.25 * i for i in range(6)])
    assert [sent for _, sent, _ in target.submitted] == pytest.approx([50 + 0.25 * i for i in range(6)])
    assert [ttft_ms(s) for s in stats] == pytest.approx([1000 + 750 * i for i in range(6)])
    assert [queue_ms(s) for s in stats] == pytest.approx([750 * i for i in range(6)], abs=1e-6)
    assert target.most_in_flight == 5


def test_latencies_are_known_while_requests_are_under_way():
    """TTFT is final with the first token; TPOT so far is that of the tokens there are."""
    short = Plan([(0.1, 1, "a"), (0.25, 1, "b")], "stop")
    long = Plan([(0.1, 2, "a"), (0.2, 2, "b"), (0.2, 2, "c"), (0.2, 2, "d")], "stop")
    silent = Plan([(0.9, 1, "a")], "stop")
    plans = {"run-0": short, "run-1": long, "run-2": silent}
    in_flight: dict[str, Flight] = {}
    seen = []

    class Watching(Sink):
        def on_request_finished(self, stats: RequestStats) -> None:
            super().on_request_finished(stats)
            seen.append(under_way(in_flight.values()))

    result = run(
        SimulatedTarget(lambda request_id, *_: plans[request_id]), workload(3), Watching(), in_flight=in_flight
    )
    long_stats = by_index(result)[1]
    count, (ttft,), (tpot,) = seen[0]
    assert count == 2
    assert ttft == pytest.approx(ttft_ms(long_stats))
    assert tpot == pytest.approx(200 / 3), "4 tokens in 2 deliveries 200 ms apart"
    assert seen[-1] == (0, [], [])
    assert in_flight == {}


def test_a_late_driver_does_not_hide_queueing():
    """Sending is held up by 2 s in the target's own submit, as slow tokenization would: TTFT holds it all."""
    target = SimulatedTarget(always(tokens(1, first=0.5)))
    submit = target.submit

    def slow(*arguments: Any, **more: Any) -> None:
        target.now += 2.0
        submit(*arguments, **more)

    target.submit = slow  # type: ignore[method-assign]
    stats = by_index(run(target, workload(3, kind="constant", rate=10.0)))
    assert [s.arrival_time for s in stats] == pytest.approx([50.0, 50.1, 50.2])
    assert [ttft_ms(s) for s in stats] == pytest.approx([2500, 4400, 6300])


def test_poisson_arrivals_are_the_planned_ones():
    spec = workload(20, kind="poisson", rate=3.0)
    planned = [request.arrival_s for request in build_requests(spec, None)]
    stats = by_index(run(SimulatedTarget(always(tokens(2))), spec))
    assert [s.arrival_time - 50.0 for s in stats] == pytest.approx(planned)


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_closed_loop_keeps_its_number_in_flight(concurrency: int):
    lengths = {f"run-{index}": 1 + index % 4 for index in range(20)}
    target = SimulatedTarget(lambda request_id, prompt, sampling: tokens(lengths[request_id], gap=0.3))
    result = run(target, workload(20, kind="closed_loop", concurrency=concurrency))
    assert target.most_in_flight == min(concurrency, 20)
    ends = sorted(stats.finish_time for stats in result.requests)
    arrivals = [stats.arrival_time for stats in by_index(result)]
    assert arrivals[:concurrency] == [50.0] * min(concurrency, 20)
    # Each of the others arrives at the end of an earlier one.
    assert arrivals[concurrency:] == pytest.approx(ends[: 20 - min(concurrency, 20)])
    assert [ttft_ms(stats) for stats in result.requests] == pytest.approx([100] * 20)


def test_warmup_comes_first_and_is_flagged():
    sink = Sink()
    target = SimulatedTarget(always(tokens(3)))
    result = run(target, workload(4, warmup=2), sink)
    warm = [stats for stats in result.requests if stats.warmup]
    assert [(stats.request_id, stats.index) for stats in warm] == [("run-warmup-0", 0), ("run-warmup-1", 1)]
    assert max(s.finish_time for s in warm) <= min(s.arrival_time for s in by_index(result))
    assert sink.requests == list(result.requests)
    assert [phase.name for phase in sink.phases if phase.done == 0] == ["warming up", "running"]
    assert (sink.phases[-1].name, sink.phases[-1].done, sink.phases[-1].total) == ("running", 4, 4)
    assert summarize(result.requests, slo_limits={}).num_requests == 4


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_warmup_changes_no_figure(warmup: int):
    slow_then_fast = {f"run-warmup-{index}": tokens(8, first=9.0, gap=2.0) for index in range(3)}
    target = SimulatedTarget(lambda request_id, prompt, sampling: slow_then_fast.get(request_id, tokens(8)))
    summary = summarize(run(target, workload(5, warmup)).requests, slo_limits={})
    assert summary.duration_s == pytest.approx(0.17)
    assert summary.ttft_ms.max == pytest.approx(100)


def test_a_refused_request_fails_alone():
    def plan(request_id: str, prompt: Prompt, sampling: SamplingParams) -> Plan:
        if prompt.text == "prompt 2":
            raise RequestError("the prompt has 9,000 tokens, allowed are 8,192")
        return tokens(2)

    target = SimulatedTarget(plan)
    result = run(target, workload(5, kind="closed_loop", concurrency=2))
    assert result.status == "finished"
    assert result.error == "1 of 5 requests failed; the first: the prompt has 9,000 tokens, allowed are 8,192"
    refused = by_index(result)[2]
    assert (refused.status, refused.finish_reason) == ("failed", "error")
    assert refused.error == "the prompt has 9,000 tokens, allowed are 8,192"
    assert (refused.emission_times, refused.num_prompt_tokens) == ((), None)
    assert target.most_in_flight == 2
    assert summarize(result.requests, slo_limits={}).num_failed == 1


def test_a_run_without_one_success_has_failed():
    broken = Plan([(0.1, 1, "x"), (0.1, 0, "")], "error", "the logits are not finite")
    result = run(SimulatedTarget(always(broken)), workload(3))
    assert (result.status, result.error) == ("failed", "the logits are not finite")
    assert [stats.status for stats in result.requests] == ["failed"] * 3
    assert result.requests[0].num_output_tokens == 1


def test_cancel_aborts_what_is_in_flight():
    cancel = threading.Event()
    target = SimulatedTarget(lambda request_id, *_: tokens(2 if request_id == "run-0" else 1000))
    target.on_wait = lambda: cancel.set() if target.now > 52.0 else None
    result = run(target, workload(6, kind="closed_loop", concurrency=3), cancel=cancel)
    assert (result.status, result.error) == ("cancelled", None)
    assert [(s.index, s.status) for s in by_index(result)] == [
        (0, "finished"),
        (1, "cancelled"),
        (2, "cancelled"),
        (3, "cancelled"),
    ]
    assert sorted(target.aborted) == ["run-1", "run-2", "run-3"]
    assert not target.in_flight
    assert target.now < 52.5
    partial = summarize(result.requests, slo_limits={})
    assert (partial.num_requests, partial.num_failed, partial.output_tokens) == (4, 0, 2)


def test_cancel_while_warming_up_measures_nothing():
    cancel, sink = threading.Event(), Sink()
    target = SimulatedTarget(always(tokens(1000)))
    target.on_wait = lambda: cancel.set() if target.now > 51.0 else None
    result = run(target, workload(4, warmup=1), sink, cancel)
    assert result.status == "cancelled"
    assert [(stats.warmup, stats.status) for stats in result.requests] == [(True, "cancelled")]
    assert {phase.name for phase in sink.phases} == {"warming up"}


def test_cancel_does_not_wait_for_ever():
    cancel = threading.Event()
    target = SimulatedTarget(always(Plan([(0.1, 1, "x"), (1e6, 1, "y")])))
    target.deaf = True
    target.on_wait = lambda: cancel.set() if target.now > 51.0 else None
    result = run(target, workload(2), cancel=cancel)
    assert result.status == "cancelled"
    assert [(s.status, s.finish_reason, s.emission_tokens) for s in result.requests] == [
        ("cancelled", "abort", (1,))
    ] * 2
    assert target.now == pytest.approx(51.0 + ABORT_TIMEOUT_S, abs=0.5)


def test_a_target_that_falls_silent_fails_the_run():
    target = SimulatedTarget(always(Plan([(0.1, 1, "x"), (1e6, 1, "y")])))
    target.deaf = True
    result = run(target, workload(2), target_failure=lambda: "the engine died" if target.now > 55 else None)
    assert (result.status, result.error) == ("failed", "the engine died")
    assert [(s.status, s.error) for s in result.requests] == [("failed", "the engine died")] * 2


def test_ends_delivered_by_a_dying_target_count():
    """All requests end while the target is already down: nothing is lost and nothing is made up."""
    target = SimulatedTarget(always(tokens(3)))
    result = run(target, workload(4), target_failure=lambda: None if target.in_flight else "the engine died")
    assert [stats.status for stats in result.requests] == ["finished"] * 4


def test_an_engine_that_cannot_take_requests_fails_the_run():
    def plan(request_id: str, prompt: Prompt, sampling: SamplingParams) -> Plan:
        if request_id == "run-2":
            raise EngineError("no model is loaded")
        return tokens(1000)

    target = SimulatedTarget(plan)
    result = run(target, workload(5))
    assert (result.status, result.error) == ("failed", "no model is loaded")
    assert [(s.index, s.status) for s in by_index(result)] == [(0, "cancelled"), (1, "cancelled"), (2, "failed")]
    assert not target.in_flight


def test_an_unexpected_error_leaves_nothing_in_flight():
    def plan(request_id: str, prompt: Prompt, sampling: SamplingParams) -> Plan:
        if request_id == "run-2":
            raise ZeroDivisionError
        return tokens(1000)

    target = SimulatedTarget(plan)
    with pytest.raises(ZeroDivisionError):
        run(target, workload(5))
    assert target.aborted == ["run-0", "run-1"]
    assert not target.in_flight


def test_progress_is_reported_ten_times_a_second_at_most():
    sink = Sink()
    run(SimulatedTarget(always(tokens(1, first=0.01)), capacity=1), workload(200), sink)
    counts = [phase.done for phase in sink.phases]
    assert (counts[0], counts[-1]) == (0, 200)
    assert counts == sorted(counts, key=lambda count: count or 0)
    assert len(counts) <= 2 / 0.1 + 2


def test_progress_that_was_held_back_is_reported_soon():
    """Five requests end at once, the sixth much later: meanwhile the run shows five."""
    sink = Sink()
    target = SimulatedTarget(lambda request_id, *_: tokens(1, first=60.0 if request_id == "run-5" else 1.0))
    shown: list[tuple[float, float | None]] = []
    target.on_wait = lambda: shown.append((target.now, sink.phases[-1].done))
    run(target, workload(6), sink)
    assert {done for now, done in shown if 51.3 < now < 109} == {5}


class ThreadedTarget:
    """Delivers in real time, from a thread per request."""

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        on_event: Any,
        arrival_time: Any = None,
        priority: int = 0,
    ) -> None:
        def serve() -> None:
            for index in range(sampling.max_tokens):
                time.sleep(0.01)
                last = index == sampling.max_tokens - 1
                on_event(StreamEvent(request_id, time.perf_counter(), (index,), "x", "length" if last else None))

        threading.Thread(target=serve, daemon=True).start()

    def abort(self, request_id: str) -> None:
        raise AssertionError("nothing is left to abort")


def test_in_real_time_a_jump_of_the_wall_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    started = time.perf_counter()
    wall = time.time

    def jumping() -> float:
        return wall() - (3600 if time.perf_counter() - started > 0.1 else 0)

    monkeypatch.setattr(time, "time", jumping)
    spec = workload(4, output_len=20, kind="closed_loop", concurrency=2)
    result = run_workload(
        spec, ThreadedTarget(), Sink(), warmup=(), requests=build_requests(spec, None), cancel=threading.Event()
    )
    elapsed = time.perf_counter() - started
    summary = summarize(result.requests, slo_limits={})
    assert result.status == "finished"
    assert 0.4 <= summary.duration_s <= elapsed
    assert all(200 <= (e2el_ms(stats) or 0) <= 1e3 * elapsed for stats in result.requests)
    assert summary.tpot_ms.min is not None
    assert summary.tpot_ms.min >= 10
