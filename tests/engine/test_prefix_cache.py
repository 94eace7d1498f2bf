"""Prefix caching in a real engine: the tokens of the dense model, whatever was there before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from tests.engine.driving import answers, config_of, tokens
from tests.helpers import dense_greedy, load_oracle

SETTINGS: list[dict[str, Any]] = [
    {},
    {"scheduler__max_num_batched_tokens": 24},
    {"scheduler__async_scheduling": True},
    {"cache__num_blocks": 24},
    {"cache__block_size": 1},
    {"cache__block_size": 32},
]


def prompts_with_common_beginnings() -> dict[str, list[int]]:
    rng = random.Random(2)
    stem = [rng.randrange(256) for _ in range(70)]
    return {
        f"{length}+{more}": stem[:length] + [rng.randrange(256) for _ in range(more)]
        for length in (16, 32, 33, 70)
        for more in (0, 1, 20)
    }


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_on_equals_off_equals_dense(host: EngineHost, tiny_llama: Path, settings: dict[str, Any]) -> None:
    """All at once, then the same again out of the cache, then a second turn over each answer."""
    prompts = prompts_with_common_beginnings()
    oracle = load_oracle(tiny_llama)
    expected = {key: dense_greedy(oracle, prompt, 12) for key, prompt in prompts.items()}
    host.load(config_of(tiny_llama, cache__enable_prefix_caching=False, **settings))
    assert tokens(host, prompts, max_tokens=12, ignore_eos=True) == expected
    assert host.num_cached_tokens() == 0
    host.load(config_of(tiny_llama, **settings))
    for _ in range(2):
        collected = answers(host, prompts, max_tokens=12, ignore_eos=True)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
    hits = {key: answer.last.num_cached_tokens or 0 for key, answer in collected.items()}
    block_size = settings.get("cache__block_size", 16)
    if "cache__num_blocks" in settings:
        assert sum(hits.values()) > 0, "something of a small pool is found"
    else:
        # Full blocks of all but the last token.
        assert hits == {key: (len(prompt) - 1) // block_size * block_size for key, prompt in prompts.items()}
    turns = {key: prompt + expected[key] + [7, 8, 9] for key, prompt in prompts.items()}
    assert tokens(host, turns, max_tokens=8, ignore_eos=True) == {
        key: dense_greedy(oracle, prompt, 8) for key, prompt in turns.items()
    }


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_tokens_do_not_depend_on_what_was_cached(
    host: EngineHost, tiny_llama: Path, temperature: float
) -> None:
    host.load(config_of(tiny_llama))
    prompts = prompts_with_common_beginnings()
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": temperature, "top_p": 0.9, "seed": 3}
    host.reset_prefix_cache()
    cold = {
        key: tokens(host, {key: prompt}, **options)[key]
        for key, prompt in prompts.items()
        if host.reset_prefix_cache() >= 0
    }
    warm = tokens(host, prompts, **options)
    assert warm == cold


def test_a_reset_makes_the_next_request_run_whole(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    prompt = list(range(50))

    def ask() -> int | None:
        return answers(host, {"a": prompt}, max_tokens=2)["a"].last.num_cached_tokens

    host.reset_prefix_cache()
    assert (ask(), ask()) == (0, 48)
    assert host.num_cached_tokens() == 48
    assert host.reset_prefix_cache() == 48
    assert (ask(), ask()) == (0, 48)


def test_nobody_is_told_of_a_cache_that_is_off(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama, cache__enable_prefix_caching=False))
    assert answers(host, {"a": list(range(50))}, max_tokens=2)["a"].last.num_cached_tokens is None
