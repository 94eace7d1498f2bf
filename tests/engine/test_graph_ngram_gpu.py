"""Drafts that a CUDA device looks up in the text, round behind round without the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from tests.engine.driving import config_of
from tests.engine.few_tokens import PROMPTS
from tests.engine.heads import answers_and_rounds
from tests.engine.looking_up import check_drafts, circle, count_rounds, make_circling
from tests.helpers import dense_greedy, load_oracle

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {
    "model__device": "cuda",
    "model__dtype": "float32",
    "model__max_model_len": 192,
    "speculative__method": "ngram",
}


@pytest.fixture
def gpu_host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_rounds(monkeypatch)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"scheduler__max_num_batched_tokens": 33},
        {"cache__num_blocks": 16},
        {"cache__block_size": 1},
        {"scheduler__max_num_seqs": 3},
        {"speculative__adaptive": True},
        {"speculative__num_speculative_tokens": 3, "speculative__ngram_min": 2},
    ],
    ids=str,
)
def test_tokens_are_the_dense_model_s_and_drafts_what_the_text_says(
    gpu_host: EngineHost, calls: Counter[str], few_tokens: Path, overrides: dict[str, Any]
) -> None:
    oracle = load_oracle(few_tokens)
    expected = {key: dense_greedy(oracle, prompt, 60) for key, prompt in PROMPTS.items()}
    gpu_host.load(config_of(few_tokens, **OPTIONS | overrides))
    for _ in range(2):
        collected, rounds = answers_and_rounds(gpu_host, PROMPTS, max_tokens=60, ignore_eos=True)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
        check_drafts(PROMPTS, collected, rounds, overrides.get("speculative__ngram_min", 1))
        assert rounds
    assert calls["repeat"] > 0 or overrides.get("speculative__adaptive")  # which drafts only as much as pays


def test_rounds_follow_each_other_without_the_host(gpu_host: EngineHost, calls: Counter[str], tmp_path: Path) -> None:
    gpu_host.load(config_of(make_circling(tmp_path / "model"), **OPTIONS))
    prompts = {str(index): circle(index, 45 + index) for index in range(4)}
    collected, rounds = answers_and_rounds(gpu_host, prompts, max_tokens=61, ignore_eos=True)
    for index, (key, prompt) in enumerate(prompts.items()):
        assert collected[key].token_ids == circle(index + len(prompt), 61)
    assert all(it.num_accepted == len(it.draft_token_ids) for it in rounds)
    assert calls["repeat"] > 5
