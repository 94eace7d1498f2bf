"""Rows of the equivalence matrix: what must not change the tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from backend.engine.engine_host import EngineHost
from tests.engine.driving import answers, config_of, tokens
from tests.helpers import dense_greedy, load_oracle

MAX_TOKENS = 18  # beyond the block in which any prompt ends
SAMPLINGS = [
    pytest.param({"max_tokens": MAX_TOKENS, "ignore_eos": True}, id="greedy"),
    pytest.param({"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 11}, id="sampled"),
    pytest.param(
        {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 5},
        id="filtered",
    ),
]


def prompts_of(lengths: list[int], seed: int = 0) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"p{length}": [rng.randrange(256) for _ in range(length)] for length in lengths}


PROMPTS = prompts_of([1, 2, 15, 16, 17, 31, 40, 100])


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 128, 256])
def test_paged_equals_dense_at_every_block_size(host: EngineHost, tiny_llama: Path, block_size: int) -> None:
    oracle = load_oracle(tiny_llama)
    host.load(config_of(tiny_llama, cache__block_size=block_size))
    prompts = prompts_of([1, 7, 100, 513])
    expected = {key: dense_greedy(oracle, prompt, 16) for key, prompt in prompts.items()}
    assert tokens(host, prompts, max_tokens=16, ignore_eos=True) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_do_not_depend_on_batch_chunks_or_preemption(host: EngineHost, tiny_llama: Path, sampling: dict) -> None:
    host.load(config_of(tiny_llama))
    alone: dict[str, list[int]] = {}
    for key, prompt in PROMPTS.items():
        alone |= tokens(host, {key: prompt}, **sampling)
    assert all(len(ids) == MAX_TOKENS for ids in alone.values())
    assert len({tuple(ids) for ids in alone.values()}) == len(PROMPTS), "prompts should not all lead to one answer"

    assert tokens(host, PROMPTS, **sampling) == alone, "batched"
    for budget in (1, 16, 33):
        host.load(config_of(tiny_llama, scheduler__max_num_batched_tokens=budget))
        assert tokens(host, PROMPTS, **sampling) == alone, f"in chunks of at most {budget}"
    host.load(config_of(tiny_llama, scheduler__max_num_seqs=2))
    assert tokens(host, PROMPTS, **sampling) == alone, "two at a time"

    host.load(config_of(tiny_llama, cache__num_blocks=10, cache__block_size=16))
    preempted = answers(host, PROMPTS, **sampling)
    assert {key: answer.token_ids for key, answer in preempted.items()} == alone, "preempted"
    assert sum(answer.last.num_preemptions or 0 for answer in preempted.values()) > 0, "nothing was preempted"


@pytest.mark.parametrize("num_seqs", [2, 40])
def test_the_smallest_budget_with_a_pool_that_runs_out(host: EngineHost, tiny_llama: Path, num_seqs: int) -> None:
    """Among its steps are some that can only preempt."""
    prompts = prompts_of([1, 2, 3, 4, 5, 6, 7, 8])
    oracle = load_oracle(tiny_llama)
    host.load(
        config_of(
            tiny_llama,
            cache__num_blocks=8,
            cache__block_size=2,
            scheduler__max_num_batched_tokens=1,
            scheduler__max_num_seqs=num_seqs,
        )
    )
    expected = {key: dense_greedy(oracle, prompt, 16 - len(prompt)) for key, prompt in prompts.items()}
    assert tokens(host, prompts, max_tokens=50, ignore_eos=True) == expected


def test_another_seed_gives_other_tokens(host: EngineHost, tiny_llama: Path) -> None:
    host.load(config_of(tiny_llama))
    prompt = {"p": [1, 2, 3]}
    first, second = (
        tokens(host, prompt, max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 2)
    )
    assert first != second
