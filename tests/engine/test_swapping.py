"""Preemption by swapping in a real engine: the tokens are those of an engine that never preempts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from backend.errors import CapacityError, ConfigError
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.pool_history import PoolHistory
from tests.engine.driving import Answer, answers, config_of, held
from tests.engine.test_engine_host import StepSink
from tests.engine.test_samples import submit_samples
from tests.helpers import dense_greedy, load_oracle

PROMPTS = {
    str(length): [random.Random(length).randrange(256) for _ in range(length)] for length in (3, 15, 16, 17, 30, 40)
}
MAX_TOKENS = 20
SWAP = {"scheduler__preemption": "swap", "cache__num_blocks": 9}


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    oracle = load_oracle(tiny_llama)
    return {key: dense_greedy(oracle, prompt, MAX_TOKENS) for key, prompt in PROMPTS.items()}


def run(host: EngineHost, **sampling: Any) -> tuple[dict[str, Answer], StepSink]:
    sink = StepSink()
    host.set_sink(sink)  # type: ignore[arg-type]
    collected = answers(host, PROMPTS, max_tokens=MAX_TOKENS, ignore_eos=True, **sampling)
    host.set_sink(None)
    return collected, sink


@pytest.mark.parametrize(
    ("dtype", "asynchronous", "prefix_caching"),
    [("auto", False, False), ("auto", False, True), ("auto", True, True), ("int8", True, False)],
)
def test_tokens_are_those_without_preemption(
    host: EngineHost,
    tiny_llama: Path,
    expected: dict[str, list[int]],
    dtype: str,
    asynchronous: bool,
    prefix_caching: bool,
) -> None:
    common: dict[str, Any] = {
        "cache__dtype": dtype,
        "cache__enable_prefix_caching": prefix_caching,
        "scheduler__async_scheduling": asynchronous,
    }
    if dtype != "auto":
        host.load(config_of(tiny_llama, **common))
        expected = {key: answer.token_ids for key, answer in run(host)[0].items()}
    host.load(config_of(tiny_llama, **common, **SWAP))
    collected, sink = run(host)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    swapped = sum(step.num_swapped for step in sink.steps)
    assert swapped == sum(step.num_preempted for step in sink.steps) > 0
    out, back = (sum(getattr(step, f"num_swapped_{way}_blocks") for step in sink.steps) for way in ("out", "in"))
    assert 0 < back <= out or prefix_caching
    info = host.info
    assert info is not None
    bytes_per_block = 16 * info.load["kv_bytes_per_token"]
    assert sum(step.swapped_bytes for step in sink.steps) == (out + back) * bytes_per_block


def test_a_small_host_memory_falls_back(host: EngineHost, tiny_llama: Path, expected: dict[str, list[int]]) -> None:
    info = host.load(config_of(tiny_llama, **SWAP))
    bytes_per_block = 16 * info.load["kv_bytes_per_token"]
    host.load(config_of(tiny_llama, **SWAP, cache__swap_bytes=2 * bytes_per_block))
    collected, sink = run(host)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert 0 < sum(step.num_swapped for step in sink.steps) < sum(step.num_preempted for step in sink.steps)
    with pytest.raises(CapacityError, match=r"cache.swap_bytes = 100 holds no block, which takes 9,216 bytes"):
        host.load(config_of(tiny_llama, **SWAP, cache__swap_bytes=100))
    with pytest.raises(CapacityError, match=r"host cannot give .* lower cache.swap_bytes"):
        host.load(config_of(tiny_llama, **SWAP, cache__swap_bytes=2**50))
    with pytest.raises(ConfigError, match=r"scheduler.preemption.*'recompute', 'swap'"):
        config_of(tiny_llama, scheduler__preemption="drop")


def test_sampled_tokens_and_samples(host: EngineHost, tiny_llama: Path) -> None:
    options = {"max_tokens": 20, "temperature": 1.1, "seed": 4, "ignore_eos": True}

    def ask() -> tuple[dict[str, list[int]], int]:
        with held(host):
            collected = submit_samples(host, "a", PROMPTS["40"], 4, **options)
            collected |= submit_samples(host, "b", PROMPTS["17"], 3, **options)
        events = {key: answer.last for key, answer in collected.items()}
        tokens = {key: answer.token_ids for key, answer in collected.items()}
        return tokens, sum(event.num_preemptions or 0 for event in events.values())

    host.load(config_of(tiny_llama, cache__enable_prefix_caching=False))
    plain, none = ask()
    host.load(config_of(tiny_llama, cache__enable_prefix_caching=False, **SWAP))
    swapped, some = ask()
    assert swapped == plain
    assert (none, some > 0) == (0, True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_ledger_follows_blocks_out_and_back(host: EngineHost, tiny_llama: Path, asynchronous: bool) -> None:
    host.load(config_of(tiny_llama, scheduler__async_scheduling=asynchronous, **SWAP))
    host.reset_prefix_cache()
    _, sink = run(host)
    reader = LedgerReader([chunk[1:] for chunk in sink.chunks])
    history = PoolHistory(reader, 16)
    block_map = reader.block_map(0)
    assert block_map is not None
    out = back = 0
    for number, stats in enumerate(sink.steps):
        step = reader.step(number)
        if number:
            block_map.apply(step.events)
        for event in step.events:
            out += len(event.block_ids) if event.kind == "swap_out" else 0
            back += len(event.block_ids) if event.kind == "swap_in" else 0
        moment = PoolHistory(reader, 16).at(number)
        forward = history.at(number)
        assert moment is not None
        assert forward is not None
        assert moment.num_tokens == forward.num_tokens
        assert block_map.held == moment.blocks.held
        assert block_map.counts(9)[0] == stats.num_referenced_blocks
        for key, num_tokens in moment.num_tokens.items():
            assert -(-num_tokens // 16) == len(block_map.held[key][0])
    assert out == sum(step.num_swapped_out_blocks for step in sink.steps) > 0
    assert back == sum(step.num_swapped_in_blocks for step in sink.steps) > 0


@pytest.mark.parametrize("layout", ["contiguous", "none"])
def test_layouts_that_never_preempt_say_so(host: EngineHost, tiny_llama: Path, layout: str) -> None:
    info = host.load(
        config_of(tiny_llama, cache__layout=layout, scheduler__preemption="swap", model__max_model_len=128)
    )
    assert info.resolved_config.scheduler.preemption == "recompute"
    assert f"scheduler.preemption is 'recompute': nobody is preempted with cache.layout = '{layout}'." in info.notices


@pytest.fixture
def gpu_host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_swapping_on_a_gpu(gpu_host: EngineHost, tiny_llama: Path, dtype: str, enforce_eager: bool) -> None:
    """Copies that nobody waits for, with steps scheduled ahead, through graphs and without; sums do not depend on the batch."""
    common = {
        "model__device": "cuda",
        "model__max_model_len": 512,
        "cache__dtype": dtype,
        "cache__enable_prefix_caching": False,
        "kernels__batch_invariant": True,
        "kernels__enforce_eager": enforce_eager,
    }
    gpu_host.load(config_of(tiny_llama, **common, cache__num_blocks=200))
    plain, sink = run(gpu_host)
    assert sum(step.num_preempted for step in sink.steps) == 0
    gpu_host.load(config_of(tiny_llama, **common, **SWAP))
    for _ in range(3):
        swapped, sink = run(gpu_host)
        assert sum(step.num_swapped_in_blocks for step in sink.steps) > 0
        assert {key: answer.token_ids for key, answer in swapped.items()} == {
            key: answer.token_ids for key, answer in plain.items()
        }
