"""Baselines behind the same seams: every batching, policy and layout gives the tokens of the dense model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from backend.engine.llm_engine import LLMEngine
from backend.engine.loading import load_engine
from backend.errors import RequestError
from backend.metrics.stats import StepStats
from backend.sampling_params import SamplingParams
from tests.engine.driving import answers, config_of, tokens
from tests.engine.test_engine_host import StepSink
from tests.helpers import dense_greedy, load_oracle

MAX_TOKENS = 10
BASELINES = list(
    product(["continuous", "static"], ["fcfs", "prefill_first", "priority"], ["paged", "contiguous", "none"])
)


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    """Two of them begin alike; the longest is more than half of a small step."""
    rng = random.Random(4)
    made = {str(length): [rng.randrange(256) for _ in range(length)] for length in (1, 16, 17, 40, 70)}
    return made | {"40+": made["40"] + [5, 6, 7]}


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    oracle = load_oracle(tiny_llama)
    return {key: dense_greedy(oracle, prompt, MAX_TOKENS) for key, prompt in prompts.items()}


def baseline(model: Path, batching: str, policy: str, layout: str, **overrides: Any) -> Any:
    return config_of(
        model,
        scheduler__batching=batching,
        scheduler__policy=policy,
        cache__layout=layout,
        model__max_model_len=96,
        **overrides,
    )


@pytest.mark.parametrize(("batching", "policy", "layout"), BASELINES)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="room"),
        pytest.param({"cache__num_blocks": 15, "cache__block_size": 8}, id="small pool"),
        pytest.param(
            {
                "scheduler__max_num_batched_tokens": 95,
                "scheduler__max_num_seqs": 3,
                "scheduler__async_scheduling": True,
            },
            id="small steps ahead",
        ),
    ],
)
def test_tokens_are_those_of_the_dense_model(
    host: EngineHost,
    tiny_llama: Path,
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    batching: str,
    policy: str,
    layout: str,
    overrides: dict[str, Any],
) -> None:
    info = host.load(baseline(tiny_llama, batching, policy, layout, **overrides))
    resolved = info.resolved_config
    assert (resolved.scheduler.batching, resolved.scheduler.policy, resolved.cache.layout) == (batching, policy, layout)
    assert resolved.model.max_model_len == 96
    collected = answers(host, prompts, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    preemptions = sum(answer.last.num_preemptions or 0 for answer in collected.values())
    if layout != "paged":
        assert preemptions == 0
        assert {answer.last.num_cached_tokens for answer in collected.values()} == {None}
    elif "cache__num_blocks" in overrides and batching == "continuous":
        assert preemptions > 0, "the pool was meant to run out"


def steps_of(host: EngineHost, prompts: dict[str, list[int]]) -> list[StepStats]:
    sink = StepSink()
    host.set_sink(sink)  # type: ignore[arg-type]
    tokens(host, prompts, max_tokens=MAX_TOKENS, ignore_eos=True)
    host.set_sink(None)
    return sink.steps


def test_a_run_records_what_a_baseline_costs(host: EngineHost, tiny_llama: Path, prompts: dict[str, list[int]]) -> None:
    lengths = [len(prompt) for prompt in prompts.values()]
    host.load(baseline(tiny_llama, "continuous", "fcfs", "contiguous"))
    per_request = {
        step.num_referenced_blocks / step.num_running for step in steps_of(host, prompts) if step.num_running
    }
    assert per_request == {96 / 16}
    host.load(baseline(tiny_llama, "continuous", "fcfs", "none"))
    steps = steps_of(host, prompts)
    assert sum(step.num_decode_tokens for step in steps) == 0
    assert sum(step.num_prefill_tokens for step in steps) == sum(n + i for n in lengths for i in range(MAX_TOKENS))
    assert sum(step.num_output_tokens for step in steps) == MAX_TOKENS * len(prompts)
    host.load(baseline(tiny_llama, "static", "fcfs", "paged", scheduler__max_num_seqs=4))
    assert len(steps_of(host, prompts)) == 2 * MAX_TOKENS, "six requests in batches of four"


@pytest.fixture(scope="module")
def engines(tiny_llama: Path) -> Iterator[dict[str, LLMEngine]]:
    loaded = {
        policy: load_engine(
            baseline(tiny_llama, "continuous", policy, "paged", scheduler__max_num_seqs=1), lambda phase: None
        ).engine
        for policy in ("fcfs", "priority")
    }
    yield loaded
    for engine in loaded.values():
        engine.executor.shutdown()


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["a", "b", "c", "d"]), ("priority", ["c", "b", "d", "a"])])
def test_a_request_brings_its_priority(engines: dict[str, LLMEngine], policy: str, order: list[str]) -> None:
    engine = engines[policy]
    for arrival, (key, priority) in enumerate({"a": 3, "b": 0, "c": -1, "d": 0}.items()):
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        engine.add_request(key, [1, 2, 3], sampling, float(arrival), priority)
    ended = []
    while engine.has_unfinished_requests():
        ended += [event.request_id for event in engine.step() if event.finish_reason]
    assert ended == order


def test_a_layout_says_what_it_turns_off(host: EngineHost, tiny_llama: Path) -> None:
    def load(layout: str, **overrides: Any) -> tuple[bool, bool | None, list[str]]:
        info = host.load(config_of(tiny_llama, cache__layout=layout, **overrides))
        resolved = info.resolved_config
        settings = [notice.split()[0] for notice in info.notices]
        return resolved.cache.enable_prefix_caching, resolved.scheduler.async_scheduling, settings

    plain = load("paged")
    assert plain == (True, False, [])
    assert load("contiguous") == (False, False, ["cache.enable_prefix_caching"])
    assert load("contiguous", cache__enable_prefix_caching=False) == (False, False, [])
    off = ["cache.enable_prefix_caching", "scheduler.async_scheduling", "model.max_model_len"]
    assert load("none", scheduler__async_scheduling=True) == (False, False, off)


def test_without_a_cache_a_prompt_beyond_the_budget_is_refused_by_name(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama, cache__layout="none", scheduler__max_num_batched_tokens=32))
    with pytest.raises(RequestError, match=r"33 tokens, but .* 33 \(.*scheduler.max_num_batched_tokens = 32\)"):
        tokens(host, {"a": [1] * 33})
    longest = list(range(32))
    assert tokens(host, {"a": longest}, max_tokens=5, ignore_eos=True)["a"] == dense_greedy(
        load_oracle(tiny_llama), longest, 1
    )
