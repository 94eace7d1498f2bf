"""The driver and the samples of a prompt, against a target in virtual time: each is a request, the prompt is one place."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from backend.errors import ConfigError, RequestError
from backend.experiments.runner import WorkloadResult, run_workload
from backend.metrics.sinks import PeakSink
from backend.metrics.stats import Phase, RequestStats, ttft_ms
from backend.metrics.summary import summarize
from backend.workload.datasets import build_requests, build_warmup_requests, check_workload
from backend.workload.spec import Workload
from tests.experiments.simulated_target import Plan, SimulatedTarget, tokens


class Phases(PeakSink):
    def __init__(self) -> None:
        super().__init__()
        self.phases: list[Phase] = []

    def on_phase(self, phase: Phase) -> None:
        self.phases.append(phase)


def workload(count: int, n: int, warmup: int = 0, **changes: Any) -> Workload:
    return Workload.from_dict(
        {
            "source": {"kind": "prompts", "prompts": [f"prompt {index}" for index in range(count)]},
            "sampling": {"n": n, "temperature": 1.0},
            "warmup_requests": warmup,
            **changes,
        }
    )


def run(
    target: SimulatedTarget, spec: Workload, sink: Phases | None = None, cancel: threading.Event | None = None
) -> WorkloadResult:
    return run_workload(
        spec,
        target,
        sink or Phases(),
        warmup=build_warmup_requests(spec, None),
        requests=build_requests(spec, None),
        cancel=cancel or threading.Event(),
        clock=target.clock,
        wait=target.wait,
    )


def by_id(result: WorkloadResult) -> dict[str, RequestStats]:
    return {stats.request_id: stats for stats in result.requests}


def sample_of(request_id: str) -> int:
    return int(request_id.rpartition("/")[2])


def test_every_sample_is_a_request_and_a_prompt_counts_once():
    """Sample i of each prompt answers with i + 1 tokens, the first after (i + 1) / 10 s."""
    target = SimulatedTarget(lambda key, *_: tokens(sample_of(key) + 1, first=(sample_of(key) + 1) / 10))
    sink = Phases()
    result = run(target, workload(2, 3, warmup=1), sink)
    assert result.status == "finished"
    assert [request_id for request_id, _, _ in target.submitted] == ["run-warmup-0", "run-0", "run-1"]
    stats = by_id(result)
    assert set(stats) == {f"{prompt}/{i}" for prompt in ("run-warmup-0", "run-0", "run-1") for i in range(3)}
    for key, record in stats.items():
        assert record.parent_id == key.rpartition("/")[0]
        assert (record.index, record.warmup) == (int(key[-3]), "warmup" in key)
        assert record.num_output_tokens == sample_of(key) + 1
        assert ttft_ms(record) == pytest.approx((sample_of(key) + 1) * 100)
    summary = summarize(result.requests, slo_limits={})
    assert (summary.num_requests, summary.input_tokens, summary.output_tokens) == (6, 2 * 7, 2 * (1 + 2 + 3))
    assert (summary.ttft_ms.count, summary.ttft_ms.p50) == (6, pytest.approx(200))
    progress = [(phase.name, phase.done, phase.total) for phase in sink.phases]
    assert progress[0] == ("warming up", 0, 3)
    assert progress[-1] == ("running", 6, 6)


def test_a_prompt_keeps_its_place_in_a_closed_loop_until_its_last_sample_has_ended():
    target = SimulatedTarget(lambda key, *_: tokens(1, first=1.0 + sample_of(key)))
    result = run(target, workload(6, 3, arrivals={"kind": "closed_loop", "concurrency": 2}))
    assert [(key, arrival) for key, _, arrival in target.submitted] == [
        (f"run-{index}", pytest.approx(50.0 + 3 * (index // 2))) for index in range(6)
    ]
    assert target.most_in_flight == 2 * 3
    assert len(result.requests) == 6 * 3


def test_a_prompt_without_others_has_no_parent():
    result = run(SimulatedTarget(lambda *_: tokens(2)), workload(2, 1))
    assert {key: stats.parent_id for key, stats in by_id(result).items()} == {"run-0": None, "run-1": None}


def test_samples_fail_alone_and_a_refused_prompt_with_all_of_its():
    def plan(key: str, *_: Any) -> Plan:
        if key == "run-0/1":
            return Plan([(0.1, 1, "x"), (0.1, 0, "")], "error", "the logits are not finite")
        if key.startswith("run-1"):
            raise RequestError("too long")
        return tokens(2)

    spec = workload(3, 2, arrivals={"kind": "closed_loop", "concurrency": 1})
    result = run(SimulatedTarget(plan), spec)
    assert (result.status, result.error) == ("finished", "3 of 6 requests failed; the first: the logits are not finite")
    errors = {key: stats.error for key, stats in by_id(result).items() if stats.error}
    assert errors == {"run-0/1": "the logits are not finite", "run-1/0": "too long", "run-1/1": "too long"}
    assert summarize(result.requests, slo_limits={}).input_tokens == 2 * 7


def test_a_cancelled_run_aborts_each_sample_that_is_left():
    cancel = threading.Event()
    target = SimulatedTarget(lambda key, *_: tokens(1, first=1.0 if key.endswith("/0") else 1e6))
    target.on_wait = lambda: cancel.set() if target.now > 60.0 else None
    result = run(target, workload(2, 3), cancel=cancel)
    assert result.status == "cancelled"
    assert sorted(target.aborted) == ["run-0/1", "run-0/2", "run-1/1", "run-1/2"]
    ended = {key: stats.status for key, stats in by_id(result).items()}
    assert ended == {f"run-{i}/{s}": "cancelled" if s else "finished" for i in range(2) for s in range(3)}


def test_what_cannot_have_samples_is_refused():
    source = {"kind": "conversations"}
    with pytest.raises(ConfigError, match=r"sampling.n = 2 .*'conversations'.* one answer; allowed: 1"):
        Workload.from_dict({"source": source, "sampling": {"n": 2}})
    many = Workload.from_dict({"source": {"kind": "synthetic", "num_requests": 2000}, "sampling": {"n": 51}})
    with pytest.raises(ConfigError, match=r"sampling.n = 51 of 2,000 prompts are 102,000 samples; at most 100,000"):
        check_workload(many)
    check_workload(many.with_overrides({"sampling.n": 50}))


def test_priorities_reach_the_target_and_the_records():
    spec = workload(8, 2, priorities={"0": 1.0, "7": 1.0})
    target = SimulatedTarget(lambda *_: tokens(1))
    result = run(target, spec)
    asked = {f"run-{request.index}": request.priority for request in build_requests(spec, None)}
    assert set(asked.values()) == {0, 7}
    assert target.priorities == asked
    assert {stats.request_id: stats.priority for stats in result.requests} == {
        f"{key}/{i}": priority for key, priority in asked.items() for i in range(2)
    }
