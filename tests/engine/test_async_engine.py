"""Asynchronous scheduling through the whole engine: what clients receive is what they receive without it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.config import EngineConfig
from backend.core.output import ModelRunnerOutput, PendingOutput, SchedulerOutput
from backend.engine.engine_host import EngineHost
from backend.engine.llm_engine import LLMEngine
from backend.engine.loading import load_engine
from backend.errors import EngineError
from backend.metrics.ledger_format import read_chunk
from backend.sampling_params import SamplingParams
from backend.workload.targets import StreamEvent
from tests.engine.driving import Pausing, answers, between_steps, check_idle, config_of, submit, submit_to, tokens
from tests.engine.test_engine_host import StepSink
from tests.waiting import until

POOLS = [
    pytest.param({}, id="roomy"),
    pytest.param({"scheduler__max_num_batched_tokens": 16, "scheduler__max_num_seqs": 5}, id="chunks"),
    pytest.param({"cache__num_blocks": 10, "cache__block_size": 8}, id="preemption"),
    pytest.param({"scheduler__max_num_batched_tokens": 12, "cache__num_blocks": 18, "cache__block_size": 4}, id="both"),
]


@pytest.fixture(scope="module")
def engines(tiny_llama: Path) -> Iterator[dict[Any, LLMEngine]]:
    """Loaded once for each config and mode, all in this thread."""
    loaded: dict[Any, LLMEngine] = {}
    yield loaded
    for engine in loaded.values():
        engine.executor.shutdown()


def workload(seed: int, num_requests: int = 24) -> list[tuple[int, str, list[int], SamplingParams, int | None]]:
    """Requests as (step of arrival, id, prompt, sampling, number of tokens at which it is aborted)."""
    rng = random.Random(seed)
    requests = []
    for index in range(num_requests):
        max_tokens = rng.choice([1, 1, 2, 20, 40, 40])
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            temperature=rng.choice([0.0, 1.0]),
            top_k=rng.choice([-1, 20]),
            seed=index,
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.sample(range(512), rng.choice([0, 0, 20, 100]))),
            stop=tuple(rng.choice(["a", "e", "\n", "th", "\ufffd"]) for _ in range(rng.choice([0, 0, 1, 2]))),
        )
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 2, 7, 8, 9, 30, 60]))]
        abort_after = rng.choice([None, None, rng.randint(1, 4)])
        requests.append((rng.randrange(10), str(index), prompt, sampling, abort_after))
    return sorted(requests, key=lambda request: request[0])


def serve(
    engine: LLMEngine, requests: list[tuple[int, str, list[int], SamplingParams, int | None]]
) -> tuple[dict[str, Any], int]:
    """Step until all have ended; per request what its events say, their times left out, and how many preemptions it took."""
    events: dict[str, list[StreamEvent]] = {request_id: [] for _, request_id, *_ in requests}
    abort_after = {request_id: count for _, request_id, _, _, count in requests if count is not None}
    waiting, step = list(requests), 0
    pool = engine.scheduler.kv_cache_manager

    def take(event: StreamEvent) -> None:
        seen = events[event.request_id]
        assert not seen or seen[-1].finish_reason is None, "an event after the last one"
        seen.append(event)

    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][0] <= step:
            _, request_id, prompt, sampling, _ = waiting.pop(0)
            engine.add_request(request_id, prompt, sampling, 0.0)
        step += 1
        if engine.has_unfinished_requests():
            for event in engine.step():
                take(event)
        pool.check_integrity()
        for request_id, count in list(abort_after.items()):
            if sum(len(event.token_ids) for event in events[request_id]) == count:
                del abort_after[request_id]
                for aborted in engine.abort_request(request_id):
                    take(aborted)
        pool.check_integrity()
    assert pool.pool.num_referenced_blocks == 0
    assert all(seen[-1].finish_reason is not None for seen in events.values())
    told = {
        key: [(event.token_ids, event.text, event.finish_reason, event.error) for event in seen]
        for key, seen in events.items()
    }
    return told, sum(seen[-1].num_preemptions or 0 for seen in events.values())


@pytest.mark.parametrize("overrides", POOLS)
@pytest.mark.parametrize("seed", range(2))
def test_events_are_those_of_the_synchronous_engine(
    engines: dict[Any, LLMEngine], tiny_llama: Path, overrides: dict[str, Any], seed: int
) -> None:
    """Chunks, preemption, stop ids and strings, limits and aborts, sampled and greedy."""
    served = []
    for asynchronous in (False, True):
        key = (str(overrides), asynchronous)
        if key not in engines:
            config = config_of(tiny_llama, scheduler__async_scheduling=asynchronous, **overrides)
            engines[key] = load_engine(config, lambda phase: None).engine
        served.append(serve(engines[key], workload(seed)))
    (synchronous, preemptions), (ahead, preemptions_ahead) = served
    assert ahead == synchronous
    if "cache__num_blocks" in overrides:
        assert min(preemptions, preemptions_ahead) > 0, "the pool was meant to run out"
    assert {seen[-1][2] for seen in synchronous.values()} == {"stop", "length", "abort"}


class Recorded:
    """An executor that notes the order of submissions and results."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.log: list[tuple[str, int]] = []
        self.fail = False

    def submit(self, scheduled: SchedulerOutput) -> PendingOutput:
        self.log.append(("submit", scheduled.step))
        return _RecordedOutput(self, scheduled.step, self._inner.submit(scheduled))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _RecordedOutput:
    def __init__(self, executor: Recorded, step: int, inner: PendingOutput) -> None:
        self._executor, self._step, self._inner = executor, step, inner

    def result(self) -> ModelRunnerOutput:
        if self._executor.fail:
            raise RuntimeError("device-side assert")
        self._executor.log.append(("result", self._step))
        return self._inner.result()


def recorded(host: EngineHost) -> Recorded:
    engine = host._require().engine
    engine.executor = executor = Recorded(engine.executor)  # type: ignore[assignment]
    return executor


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_step_is_in_flight_beyond_the_one_that_is_waited_for(tiny_llama: Path, asynchronous: bool) -> None:
    host = EngineHost()
    host.load(config_of(tiny_llama, scheduler__async_scheduling=asynchronous))
    log = recorded(host).log
    assert len(tokens(host, {"a": [1, 2, 3]}, max_tokens=4, ignore_eos=True)["a"]) == 4
    if asynchronous:
        expected = ["submit", "submit", "result", "submit", "result", "submit", "result", "result"]
    else:
        expected = ["submit", "result"] * 4
    assert [what for what, _ in log] == expected
    assert [step for what, step in log if what == "result"] == [0, 1, 2, 3]
    host.close()


def test_the_result_that_nobody_waits_for_any_more_is_taken_all_the_same(tiny_llama: Path) -> None:
    """A request that ends unforeseen leaves a step in flight behind it; an idle engine has none."""
    host = EngineHost()
    host.load(config_of(tiny_llama, scheduler__async_scheduling=True))
    log = recorded(host).log
    whole = tokens(host, {"a": [1]}, max_tokens=8, ignore_eos=True)["a"]
    stop = next(index for index in range(1, 8) if whole[index] not in whole[:index])
    del log[:]
    assert tokens(host, {"a": [1]}, max_tokens=8, ignore_eos=True, stop_token_ids=(whole[stop],))["a"] == whole[:stop]
    until(lambda: len(log) >= 2 * (stop + 2))
    assert [what for what, _ in log].count("result") == stop + 2, "one that samples the stop id, and one that ran ahead"
    host.close()


def test_every_config_that_needs_a_decision_has_one(host: EngineHost, tiny_llama: Path) -> None:
    assert host.load(config_of(tiny_llama)).resolved_config.scheduler.async_scheduling is False
    resolved = host.load(config_of(tiny_llama, scheduler__async_scheduling=True)).resolved_config
    assert resolved.scheduler.async_scheduling is True
    assert EngineConfig().resolve(device="cuda", max_model_len=10).scheduler.async_scheduling is True


def test_the_records_of_a_run_add_up_and_none_is_left_for_the_next(host: EngineHost, tiny_llama: Path) -> None:
    """The sink is taken away while a step that ran ahead is in flight: that step is still its own."""
    host.load(config_of(tiny_llama, scheduler__async_scheduling=True, scheduler__max_num_batched_tokens=16))
    for _ in range(3):
        sink, following = StepSink(), StepSink()
        host.reset_prefix_cache()
        host.set_sink(sink)  # type: ignore[arg-type]
        started = time.perf_counter()
        whole = answers(host, {"a": [1] * 40, "b": [2] * 5}, max_tokens=20, ignore_eos=True)["a"].token_ids
        stop = next(index for index in range(1, 20) if whole[index] not in whole[:index])
        collected = answers(host, {"c": [1] * 40}, max_tokens=20, ignore_eos=True, stop_token_ids=(whole[stop],))
        host.set_sink(following)  # type: ignore[arg-type]
        elapsed_ms = (time.perf_counter() - started) * 1e3
        assert collected["c"].finish_reason == "stop"
        assert sum(step.num_output_tokens for step in sink.steps) == 40 + stop
        # 19 decodes each; of "c" one for each token after the first, one that samples the stop id, one that ran ahead.
        assert sum(step.num_decode_tokens for step in sink.steps) == 2 * 19 + (stop - 1) + 2
        # Of the prompt that comes again, two full blocks are there.
        assert sum(step.num_prefill_tokens for step in sink.steps) == 85 - 32
        ledger = [step for _, data, *_ in sink.chunks for step in read_chunk(data).steps]
        assert [step.step for step in ledger] == [step.step for step in sink.steps] == list(range(len(sink.steps)))
        check_idle(host)
        host.set_sink(None)
        assert (following.steps, following.chunks) == ([], [])
        assert sum(step.duration_ms for step in sink.steps) < elapsed_ms, "no time is counted twice"
        for before, after in zip(sink.steps, sink.steps[1:], strict=False):
            assert after.start_time >= before.end_time - 1e-9
        assert sum(step.execute_ms for step in sink.steps) < elapsed_ms
        assert min(min(step.schedule_ms, step.execute_ms, step.process_ms) for step in sink.steps) >= 0


def test_a_device_that_fails_late_ends_every_request_with_the_cause(tiny_llama: Path) -> None:
    host = EngineHost()
    host.load(config_of(tiny_llama, scheduler__async_scheduling=True))
    executor = recorded(host)
    first = submit_to(Pausing(), host, "0", [0], max_tokens=900, ignore_eos=True)
    with first.paused():
        others = [submit(host, str(index), [index], max_tokens=900, ignore_eos=True) for index in (1, 2)]
        executor.fail = True
    for answer in (first, *others):
        assert answer.finish_reason == "error"
        assert answer.last.error == "the engine failed in a step: RuntimeError: device-side assert"
    until(lambda: host.state == "failed")
    with pytest.raises(EngineError, match="no model is loaded"):
        host.set_sink(None)
    host.load(config_of(tiny_llama, scheduler__async_scheduling=True))
    assert len(tokens(host, {"a": [1]}, max_tokens=3, ignore_eos=True)["a"]) == 3
    host.close()


def test_a_failure_in_the_step_that_a_change_of_sink_waits_for(tiny_llama: Path) -> None:
    host = EngineHost()
    host.load(config_of(tiny_llama, scheduler__async_scheduling=True))
    executor = recorded(host)
    answer = submit_to(Pausing(), host, "a", [1], max_tokens=900, ignore_eos=True)

    def change() -> None:
        executor.fail = True
        host._set_sink(None)

    with pytest.raises(EngineError, match="the engine is failed"):
        between_steps(host, answer, lambda: host._call(change))
    assert answer.finish_reason == "error"
    host.close()


def test_another_model_may_be_loaded_with_steps_in_flight(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama, scheduler__async_scheduling=True))
    answer = submit_to(Pausing(), host, "a", [1], max_tokens=900, ignore_eos=True)
    another = config_of(tiny_llama, scheduler__async_scheduling=True, cache__block_size=32)
    between_steps(host, answer, lambda: host.load(another))
    assert answer.last.error == "another model was loaded"
    assert len(tokens(host, {"a": [1]}, max_tokens=3, ignore_eos=True)["a"]) == 3
