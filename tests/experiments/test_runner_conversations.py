"""The driver and conversations, against a target in virtual time: each turn follows the answer before it, word for word."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from backend.errors import RequestError
from backend.experiments.runner import POLL_S, WorkloadResult, run_workload
from backend.metrics.sinks import PeakSink
from backend.metrics.stats import Phase, RequestStats
from backend.metrics.summary import summarize
from backend.sampling_params import SamplingParams
from backend.workload.datasets import WorkloadRequest, build_requests, build_warmup_requests
from backend.workload.spec import Workload
from backend.workload.targets import Prompt, StreamEvent
from tests.experiments.simulated_target import Plan, SimulatedTarget

Turns = list[RequestStats]


class Target(SimulatedTarget):
    """Remembers prompts, and answers each request in its own way: its events carry 0, 1, 2, ... each."""

    def __init__(self, plan: Callable[[str], Plan] | None = None, **options: Any) -> None:
        super().__init__(lambda request_id, *_: (plan or answer_of)(request_id), **options)
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.log: list[tuple[str, str]] = []  # ("submit" or "end", request id) in order

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        on_event: Any,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        assert prompt.token_ids is not None
        self.prompts[request_id] = prompt.token_ids

        def on_event_too(event: StreamEvent) -> None:
            if event.finish_reason is not None:
                self.log.append(("end", request_id))
            on_event(event)

        super().submit(request_id, prompt, sampling, on_event_too, arrival_time, priority)
        self.log.append(("submit", request_id))


def answer_of(request_id: str) -> Plan:
    """One to five deliveries of no to three tokens after uneven pauses, the same for the same id."""
    random = Random(request_id)
    deliveries = [(random.uniform(0.01, 0.4), random.randrange(4), "x") for _ in range(random.randrange(1, 6))]
    return Plan(deliveries, random.choice(["stop", "length"]))


def answer_ids(request_id: str) -> tuple[int, ...]:
    return tuple(token_id for _, count, _ in answer_of(request_id).deliveries for token_id in range(count))


def workload(arrivals: dict[str, Any] | None = None, warmup: int = 0, **source: Any) -> Workload:
    defaults = {"num_conversations": 12, "turns": {"kind": "uniform", "min": 1, "max": 6}, "think_time_s": 0.5}
    return Workload.from_dict(
        {
            "source": {"kind": "conversations", **defaults, **source},
            "arrivals": arrivals or {"kind": "all_at_once"},
            "warmup_requests": warmup,
        }
    )


class Phases(PeakSink):
    def __init__(self) -> None:
        super().__init__()
        self.phases: list[Phase] = []

    def on_phase(self, phase: Phase) -> None:
        self.phases.append(phase)


def run(
    target: SimulatedTarget, spec: Workload, sink: Phases | None = None, cancel: threading.Event | None = None
) -> WorkloadResult:
    return run_workload(
        spec,
        target,
        sink or Phases(),
        warmup=build_warmup_requests(spec, 50_000),
        requests=build_requests(spec, 50_000),
        cancel=cancel or threading.Event(),
        clock=target.clock,
        wait=target.wait,
    )


def planned(spec: Workload) -> dict[str, WorkloadRequest]:
    """By the id under which they are sent."""
    return {
        f"run-c{request.turn.conversation}-t{request.turn.number}": request
        for request in build_requests(spec, 50_000)
        if request.turn is not None
    }


def by_conversation(spec: Workload, result: WorkloadResult) -> dict[int, Turns]:
    plan = planned(spec)
    found: dict[int, Turns] = {}
    for stats in sorted((stats for stats in result.requests if not stats.warmup), key=lambda stats: stats.index):
        turn = plan[stats.request_id].turn
        assert turn is not None
        assert stats.index == plan[stats.request_id].index
        found.setdefault(turn.conversation, []).append(stats)
    return found


ARRIVALS = [
    {"kind": "all_at_once"},
    {"kind": "gamma", "rate": 4.0, "burstiness": 0.5},
    {"kind": "closed_loop", "concurrency": 3},
]


@pytest.mark.parametrize("arrivals", ARRIVALS, ids=lambda arrivals: arrivals["kind"])
@pytest.mark.parametrize("think_time_s", [0.0, 0.7])
def test_a_prompt_is_all_that_was_said_and_the_new_tokens(arrivals: dict[str, Any], think_time_s: float):
    spec = workload(arrivals, think_time_s=think_time_s, system_len=5)
    target = Target()
    result = run(target, spec)
    assert (result.status, result.error) == ("finished", None)
    plan = planned(spec)
    assert {stats.request_id for stats in result.requests} == set(plan) == set(target.prompts)
    for turns in by_conversation(spec, result).values():
        said: tuple[int, ...] = ()
        for stats in turns:
            said += plan[stats.request_id].prompt.token_ids or ()
            assert target.prompts[stats.request_id] == said
            assert stats.token_ids == answer_ids(stats.request_id)
            said += answer_ids(stats.request_id)
    assert any(not answer_ids(request_id) for request_id in plan), "an empty answer is among them"


@pytest.mark.parametrize("arrivals", ARRIVALS, ids=lambda arrivals: arrivals["kind"])
@pytest.mark.parametrize("capacity", [1, 4, 1000])
def test_never_are_two_turns_of_a_conversation_in_flight(arrivals: dict[str, Any], capacity: int):
    spec = workload(arrivals)
    target = Target(capacity=capacity)
    run(target, spec)
    in_flight: set[str] = set()
    for what, request_id in target.log:
        conversation = request_id.split("-")[1]
        assert (conversation in in_flight) == (what == "end")
        (in_flight.discard if what == "end" else in_flight.add)(conversation)
    assert len(target.log) == 2 * len(planned(spec))
    assert target.most_in_flight > 1, "different conversations are"


def test_a_turn_arrives_when_its_pause_is_over():
    spec = workload({"kind": "poisson", "rate": 3.0})
    target = Target()
    conversations = by_conversation(spec, run(target, spec))
    plan, pauses = planned(spec), []
    for turns in conversations.values():
        first = plan[turns[0].request_id]
        assert turns[0].arrival_time == pytest.approx(50.0 + (first.arrival_s or 0))
        for before, stats in pairwise(turns):
            turn = plan[stats.request_id].turn
            assert turn is not None
            assert stats.arrival_time == pytest.approx(before.finish_time + turn.think_s)
            pauses.append(turn.think_s)
    assert len(pauses) > 20
    assert min(pauses) > 0
    arrivals = {request_id: arrival for request_id, _, arrival in target.submitted}
    assert [sent for _, sent, _ in target.submitted] == pytest.approx(
        [arrivals[request_id] for request_id, _, _ in target.submitted]
    ), "sent when it arrives"


def test_without_a_pause_a_turn_arrives_at_the_end_of_the_answer():
    spec = workload(think_time_s=0.0, num_conversations=1, turns=4)
    (turns,) = by_conversation(spec, run(Target(), spec)).values()
    assert [stats.arrival_time for stats in turns[1:]] == [stats.finish_time for stats in turns[:-1]]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_counts_conversations_that_think_too(concurrency: int):
    spec = workload({"kind": "closed_loop", "concurrency": concurrency}, think_time_s=3.0)
    conversations = by_conversation(spec, run(Target(), spec))
    begins = [turns[0].arrival_time for turns in conversations.values()]
    ends = sorted(turns[-1].finish_time for turns in conversations.values())
    assert begins[:concurrency] == [50.0] * concurrency
    assert begins[concurrency:] == pytest.approx(ends[: 12 - concurrency]), "each begins where an earlier one ends"


def test_progress_and_warmup():
    spec, sink = workload(warmup=2), Phases()
    result = run(Target(), spec, sink)
    warm = [stats.request_id for stats in result.requests if stats.warmup]
    assert sorted(warm) == ["run-warmup-0", "run-warmup-1"]
    count = len(planned(spec))
    assert (sink.phases[-1].name, sink.phases[-1].done, sink.phases[-1].total) == ("running", count, count)
    assert summarize(result.requests, slo_limits={}).num_requests == count


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "failed"])
def test_a_turn_that_fails_ends_its_conversation_only(refused: bool):
    spec = workload({"kind": "closed_loop", "concurrency": 2}, turns=4, num_conversations=5)

    def plan(request_id: str) -> Plan:
        if request_id == "run-c1-t1":
            if refused:
                raise RequestError("too long")
            return Plan([(0.1, 1, "x"), (0.1, 0, "")], "error", "too long")
        return answer_of(request_id)

    target, sink = Target(plan), Phases()
    result = run(target, spec, sink)
    assert result.status == "finished"
    assert result.error == "1 of 18 requests failed, 2 later turns were not sent; the first: too long"
    assert set(planned(spec)) - {stats.request_id for stats in result.requests} == {"run-c1-t2", "run-c1-t3"}
    assert (sink.phases[-1].done, sink.phases[-1].total) == (18, 18)


def test_when_all_first_turns_fail_nothing_hangs():
    result = run(Target(lambda _: Plan([(0.1, 0, "")], "error", "the logits are not finite")), workload(turns=3))
    assert (result.status, result.error) == ("failed", "the logits are not finite")
    assert len(result.requests) == 12


def test_cancel_while_everybody_thinks():
    cancel, target = threading.Event(), Target()
    target.on_wait = lambda: cancel.set() if target.now > 60.0 else None
    result = run(target, workload(think_time_s=10_000.0, turns=3), cancel=cancel)
    assert (result.status, result.error) == ("cancelled", None)
    assert target.now < 60.0 + 3 * POLL_S
    assert [stats.status for stats in result.requests] == ["finished"] * len(result.requests)
    assert target.aborted == []


def test_cancel_aborts_the_turns_in_flight_and_sends_no_more():
    def plan(request_id: str) -> Plan:
        return answer_of(request_id) if request_id.endswith("t0") else Plan([(0.1, 1, "x"), (1e6, 1, "y")])

    cancel, target = threading.Event(), Target(plan)
    target.on_wait = lambda: cancel.set() if target.now > 60.0 else None
    spec = workload(think_time_s=0.0, turns=3, num_conversations=4)
    result = run(target, spec, cancel=cancel)
    assert result.status == "cancelled"
    for turns in by_conversation(spec, result).values():
        assert [stats.status for stats in turns] == ["finished", "cancelled"]
    assert not target.in_flight


def test_the_same_workload_is_the_same_run():
    spec = workload({"kind": "gamma", "rate": 4.0})
    first, second = Target(), Target()
    assert run(first, spec) == run(second, spec)
    assert first.prompts == second.prompts
    other = Target()
    run(other, spec.with_overrides({"seed": 1}))
    assert other.prompts["run-c0-t0"] != first.prompts["run-c0-t0"]
