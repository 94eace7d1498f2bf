"""Samples of one prompt in a real engine: token for token the separate run with the derived seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import pytest

from backend.engine.engine_host import EngineHost
from backend.errors import ConfigError
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.pool_history import PoolHistory
from backend.metrics.stats import RequestStats
from backend.metrics.summary import summarize
from backend.request import sample_ids
from backend.sampling_params import SamplingParams, sample_seed
from backend.workload.targets import StreamEvent
from tests.engine.driving import Answer, Pausing, answers, check_idle, config_of, held, submit, tokens
from tests.engine.test_engine_host import StepSink

SAMPLED = {"temperature": 1.2, "top_p": 0.95, "ignore_eos": True}
N = 4
A = TypeVar("A", bound=Answer)


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(256) for _ in range(length)]


def submit_samples(
    host: EngineHost, key: str, prompt: Sequence[int], n: int, kind: type[A] = Answer, **sampling: Any
) -> dict[str, A]:
    collected = {sample_id: kind() for sample_id in sample_ids(key, n)}

    def take(event: StreamEvent) -> None:
        collected[event.request_id].take(event)

    host.submit(key, list(prompt), SamplingParams(n=n, **sampling), take)
    return collected


def samples(host: EngineHost, prompts: dict[str, list[int]], n: int = N, **sampling: Any) -> dict[str, Answer]:
    """Of all prompts at once; afterwards no block is held."""
    collected: dict[str, Answer] = {}
    with held(host):
        for key, prompt in prompts.items():
            collected |= submit_samples(host, key, prompt, n, **sampling)
    for answer in collected.values():
        assert answer.finish_reason == "length"
    check_idle(host)
    return collected


PROMPTS = {str(length): prompt_of(length) for length in (1, 16, 17, 40)}


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> dict[str, list[int]]:
    """Each sample as a plain request that runs by itself, nothing cached."""
    host, separate = EngineHost(), {}
    try:
        host.load(config_of(tiny_llama, cache__enable_prefix_caching=False))
        for key, prompt in PROMPTS.items():
            for index, sample_id in enumerate(sample_ids(key, N)):
                seed = sample_seed(7, index)
                separate |= tokens(host, {sample_id: prompt}, max_tokens=12, seed=seed, **SAMPLED)
    finally:
        host.close()
    return separate


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"cache__enable_prefix_caching": False},
        {"scheduler__max_num_batched_tokens": 7, "scheduler__async_scheduling": True},
        {"cache__num_blocks": 9, "cache__enable_prefix_caching": False},
        {"cache__num_blocks": 9, "scheduler__async_scheduling": True, "scheduler__max_num_batched_tokens": 33},
        {"scheduler__max_num_seqs": 3, "scheduler__batching": "static"},
        {"scheduler__max_num_seqs": 1, "cache__enable_prefix_caching": False},
        {"scheduler__policy": "prefill_first", "cache__block_size": 8},
        {"cache__layout": "contiguous", "model__max_model_len": 128},
        {"cache__layout": "none", "model__max_model_len": 128},
    ],
    ids=str,
)
def test_each_sample_is_the_separate_run(
    host: EngineHost, tiny_llama: Path, alone: dict[str, list[int]], overrides: dict[str, Any]
) -> None:
    host.load(config_of(tiny_llama, **overrides))
    collected = samples(host, PROMPTS, max_tokens=12, seed=7, **SAMPLED)
    assert {key: answer.token_ids for key, answer in collected.items()} == alone
    preemptions = sum(answer.last.num_preemptions or 0 for answer in collected.values())
    assert (preemptions > 0) == ("cache__num_blocks" in overrides)
    assert len({tuple(alone[key]) for key in sample_ids("40", N)}) == N, "seeds were meant to matter"


def test_seeds_are_a_pure_function_of_seed_and_sample() -> None:
    """As the docstring says it, worked out byte by byte; the first sample is the plain request."""
    assert [sample_seed(seed, 0) for seed in (0, 1, 2**63 - 1)] == [0, 1, 2**63 - 1]
    digest = blake2b(bytes([5, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]), digest_size=8).digest()
    assert sample_seed(5, 2) == sum(byte << 8 * place for place, byte in enumerate(digest)) // 2
    seeds = [sample_seed(seed, index) for seed in range(100) for index in range(1, 64)]
    assert len(set(seeds)) == len(seeds)
    SamplingParams(seed=max(seeds))
    params = SamplingParams(n=3, seed=5, temperature=0.5, max_tokens=9)
    assert params.sample(2) == SamplingParams(seed=sample_seed(5, 2), temperature=0.5, max_tokens=9)
    for n in (0, 65):
        with pytest.raises(ConfigError, match=rf"n = {n}\b.*(1|64)"):
            SamplingParams(n=n)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_ledger_tells_who_shares_what(
    host: EngineHost, tiny_llama: Path, asynchronous: bool, prefix_caching: bool
) -> None:
    """Two full blocks are shared by all, the third is copied by each of the others, and each fills it by itself."""
    host.load(
        config_of(tiny_llama, scheduler__async_scheduling=asynchronous, cache__enable_prefix_caching=prefix_caching)
    )
    sink = StepSink()
    host.set_sink(sink)  # type: ignore[arg-type]
    samples(host, {"a": prompt_of(40)}, n=3, max_tokens=6, temperature=1.0)
    host.set_sink(None)
    assert sum(step.num_prefill_tokens for step in sink.steps) == 40 + 2
    reader = LedgerReader([chunk[1:] for chunk in sink.chunks])
    events = [event for number in reader.steps for event in reader.step(number).events]
    assert Counter(event.kind for event in events if event.kind in ("share", "copy")) == {"share": 2, "copy": 2}
    moment = PoolHistory(reader, 16).at(3)
    assert moment is not None
    held = [groups[0] for groups in moment.blocks.held.values()]
    assert [len(blocks) for blocks in held] == [3] * 3
    assert len({tuple(blocks[:2]) for blocks in held}) == 1
    assert len({blocks[2] for blocks in held}) == 3
    assert moment.blocks.ref_counts()[held[0][0]] == 3
    assert moment.num_tokens == {"a/0": 43, "a/1": 42, "a/2": 42}
    assert (sink.steps[0].num_referenced_blocks, sink.steps[3].num_referenced_blocks) == (3, 5)


@pytest.mark.parametrize("which", ["a/0", "a/2", "a"])
def test_one_or_all_are_aborted(host: EngineHost, tiny_llama: Path, which: str) -> None:
    host.load(config_of(tiny_llama, cache__enable_prefix_caching=False))
    collected = submit_samples(host, "a", prompt_of(40), 3, Pausing, max_tokens=300, ignore_eos=True)
    other = submit(host, "b", prompt_of(5), max_tokens=30)
    for sample in ("a/0", "a/1"):
        collected[sample].go_on.set()
    with collected["a/2"].paused():
        host.abort(which)
    ended = {key: answer.finish_reason for key, answer in collected.items()}
    assert ended == {key: "abort" if key.startswith(which) else "length" for key in collected}
    assert other.last is not None
    check_idle(host)


def test_an_id_in_use_is_refused_for_all_samples(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    with held(host):
        first = submit(host, "a/1", prompt_of(5), max_tokens=300, ignore_eos=True)
        refused = submit_samples(host, "a", prompt_of(5), 2, max_tokens=3)
        host.abort("a/1")
    assert {answer.last.error for answer in refused.values()} == {
        "request id 'a/1' is already in use by an unfinished request"
    }
    assert first.finish_reason == "abort"


def test_a_prompt_with_several_samples_counts_once() -> None:
    one = RequestStats(
        request_id="r/0",
        index=0,
        warmup=False,
        status="finished",
        finish_reason="length",
        error=None,
        arrival_time=1.0,
        scheduled_time=1.0,
        emission_times=(2.0, 3.0),
        emission_tokens=(1, 1),
        finish_time=3.0,
        num_prompt_tokens=100,
        num_output_tokens=2,
        num_cached_tokens=16,
        num_preemptions=0,
        prompt=None,
        text=None,
        token_ids=None,
        parent_id="r",
    )
    other = replace(one, request_id="r/1", num_cached_tokens=None, emission_times=(2.5, 3.0))
    plain = replace(one, request_id="s", parent_id=None, num_prompt_tokens=10, num_cached_tokens=0)
    summary = summarize([one, other, plain], slo_limits={})
    assert (summary.num_requests, summary.input_tokens, summary.output_tokens) == (3, 110, 6)
    assert summary.total_throughput_tok_s == (110 + 6) / 2
    assert summary.prefix_cache_hit_rate == 16 / 110
    assert (summary.ttft_ms.min, summary.ttft_ms.max) == (1000, 1500)


def test_the_first_token_is_told_of_each(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    collected = submit_samples(host, "a", prompt_of(20), 3, max_tokens=1, temperature=1.0, seed=2)
    last = {key: answer.last for key, answer in collected.items()}
    assert {event.num_prompt_tokens for event in last.values()} == {20}
    assert [event.num_cached_tokens for event in last.values()] == [0, None, None]
    assert all(event.scheduled_time is not None for event in last.values())
    again = answers(host, {"b": prompt_of(20)}, max_tokens=1, temperature=1.0, seed=2)
    assert again["b"].token_ids == collected["a/0"].token_ids
