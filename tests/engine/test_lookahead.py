"""`speculative.method = lookahead` in a real engine: plain decoding's tokens, and windows that are the target's own doing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.errors import ConfigError
from backend.spec_decode.lookahead import LookaheadProposer
from tests.engine.driving import Answer, answers, config_of, tokens
from tests.engine.scripted import make_scripted
from tests.engine.test_equivalence import prompts_of
from tests.engine.test_samples import submit_samples
from tests.engine.test_speculative_sampling import LENGTH, TEMPERATURE, TOP_K, chi_square, law_of, too_large
from tests.helpers import dense_greedy, dense_logits, load_oracle, make_tiny_model

PROMPTS = prompts_of([1, 2, 15, 16, 17, 40, 100])
GREEDY: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(autouse=True)
def check_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELAB_DEBUG", "1")


def looking_ahead(model: object, window: int = 4, ngram: int = 4, **overrides: Any) -> EngineConfig:
    settings = {"method": "lookahead", "lookahead_window": window, "lookahead_ngram": ngram, "adaptive": False}
    return config_of(model, **{f"speculative__{key}": value for key, value in settings.items()} | overrides)


def rounds_of(collected: dict[str, Answer]) -> tuple[int, int]:
    """Rounds and accepted tokens of all."""
    each = [answer.last.speculation for answer in collected.values()]
    return sum(it.num_rounds for it in each if it), sum(it.num_accepted_tokens for it in each if it)


MATRIX: dict[str, dict[str, Any]] = {
    "blocks of one": {"cache__block_size": 1},
    "chunks": {"scheduler__max_num_batched_tokens": 40, "cache__block_size": 4},
    "two at a time": {"scheduler__max_num_seqs": 2},
    "preempted": {"cache__num_blocks": 12},
    "swapped": {"cache__num_blocks": 12, "scheduler__preemption": "swap"},
    "contiguous": {"cache__layout": "contiguous"},
    "without prefix cache": {"cache__enable_prefix_caching": False},
    "one draft": {"speculative__num_speculative_tokens": 1},
    "bigrams": {"speculative__lookahead_ngram": 2, "speculative__lookahead_window": 7},
    "one column": {"speculative__lookahead_window": 1},
    "all that a mask holds": {"speculative__lookahead_window": 29, "speculative__lookahead_ngram": 3},
    "batch invariant": {"kernels__batch_invariant": True},
}


@pytest.mark.parametrize("name", MATRIX)
def test_lookahead_equals_plain(host: EngineHost, tiny_llama: Path, name: str) -> None:
    oracle = load_oracle(tiny_llama)
    expected = {key: dense_greedy(oracle, prompt, 24) for key, prompt in PROMPTS.items()}
    host.load(looking_ahead(tiny_llama, **MATRIX[name]))
    collected = answers(host, PROMPTS, **GREEDY)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert rounds_of(collected)[0] > 10
    if name in ("preempted", "swapped"):
        assert sum(answer.last.num_preemptions or 0 for answer in collected.values()) > 0
    assert tokens(host, PROMPTS, **GREEDY) == expected, "with a prefix cache: much of each is found"


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int4"])
def test_lookahead_equals_plain_over_a_quantized_cache(host: EngineHost, tiny_llama: Path, dtype: str) -> None:
    host.load(config_of(tiny_llama, cache__dtype=dtype))
    plain = tokens(host, PROMPTS, **GREEDY)
    host.load(looking_ahead(tiny_llama, cache__dtype=dtype))
    assert tokens(host, PROMPTS, **GREEDY) == plain


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Mistral", {"sliding_window": 8}),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_lookahead_equals_plain_with_windows(
    host: EngineHost, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    """All layers, and those behind the first one: two KV groups. A node's depth is more than the layers see."""
    model = make_tiny_model(tmp_path / "model", architecture, **changes)
    oracle = load_oracle(model)
    expected = {key: dense_greedy(oracle, prompt, 24) for key, prompt in PROMPTS.items()}
    host.load(looking_ahead(model, 8, 5, cache__block_size=4, scheduler__max_num_batched_tokens=120))
    for _ in range(2):
        assert tokens(host, PROMPTS, **GREEDY) == expected


def test_random_traffic(host: EngineHost, tiny_llama: Path) -> None:
    """Prompts that begin alike, of any length, with ends of their own, over a pool that is too small for all."""
    oracle, rng = load_oracle(tiny_llama), random.Random(4)
    host.load(looking_ahead(tiny_llama, 3, 3, cache__num_blocks=40, cache__block_size=4, scheduler__max_num_seqs=6))
    num_accepted = 0
    for _ in range(3):
        shared = [rng.randrange(256) for _ in range(30)]
        prompts = {
            str(index): shared[: rng.randint(0, 30)] + [rng.randrange(256) for _ in range(rng.randint(1, 30))]
            for index in range(9)
        }
        length = rng.randint(5, 40)
        collected = answers(host, prompts, max_tokens=length, ignore_eos=True)
        for key, prompt in prompts.items():
            assert collected[key].token_ids == dense_greedy(oracle, prompt, length)
        num_accepted += rounds_of(collected)[1]
    assert num_accepted > 10


class _Watching(LookaheadProposer):
    """Keeps what each window was, the text before it, and what the target gave behind its last row."""

    seen: list[tuple[list[int], np.ndarray, list[int]]]

    def observe(self, request_ids: Sequence[str], token_ids: Tensor) -> None:
        for request_id, outputs in zip(request_ids, token_ids.tolist(), strict=True):
            state = self._states[request_id]
            self.seen.append((list(state.text), state.window.token_ids.copy(), outputs))
        super().observe(request_ids, token_ids)


def test_the_target_sees_of_a_window_what_belongs_to_a_node(
    host: EngineHost, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each column's last row stands what the dense model gives for the text, the first row up to there, the column."""
    monkeypatch.setattr("backend.worker.lookahead_runner.LookaheadProposer", _Watching)
    monkeypatch.setattr(_Watching, "seen", [], raising=False)
    host.load(looking_ahead(tiny_llama, cache__block_size=4, scheduler__max_num_batched_tokens=64))
    answers(host, prompts_of([3, 17, 30]), max_tokens=12, ignore_eos=True)
    oracle = load_oracle(tiny_llama)
    assert len(_Watching.seen) > 20
    for text, window, outputs in _Watching.seen[::5]:
        for column, output in enumerate(outputs):
            line = [*window[0, :column].tolist(), *window[:, column].tolist()]
            assert output == int(dense_logits(oracle, [*text, *line])[-1].argmax())
    host.unload()


def test_a_text_that_goes_round_is_drafted_whole(host: EngineHost, tmp_path: Path) -> None:
    circle = [10, 11, 12, 13, 14, 15]
    model = make_scripted(tmp_path / "model", [[*circle, circle[0]]])
    host.load(looking_ahead(model))
    answer = answers(host, {"a": [10]}, max_tokens=97, ignore_eos=True)["a"]
    assert answer.token_ids == [circle[index % 6] for index in range(1, 98)]
    counts = answer.last.speculation
    assert counts is not None
    assert 1 + counts.num_accepted_tokens / counts.num_rounds > 4
    assert [len(event.token_ids) for event in answer.events][-6:-1] == [6] * 5, "five drafts and the bonus"


def test_n_grams_come_from_the_target_and_not_from_the_text(host: EngineHost, tmp_path: Path) -> None:
    """A prompt of the letters in disorder, and an answer that has each of them once, in order: no text repeats itself.

    What followed a letter in the prompt is never what follows it in the answer, so prompt lookup is wrong every time.
    """
    letters = list(range(97, 123))
    model = make_scripted(tmp_path / "model", [[*letters, 200]])
    prompt = [*letters[2::3], *letters[1::3], *letters[::3]]
    assert not any(following == token + 1 for token, following in pairwise(prompt))
    prompt.append(97)
    accepted = {}
    for config in (looking_ahead(model), config_of(model, speculative__method="ngram", speculative__adaptive=False)):
        host.load(config)
        collected = answers(host, {"a": prompt}, max_tokens=25, ignore_eos=True)
        assert collected["a"].token_ids == letters[1:]
        accepted[config.speculative.method] = rounds_of(collected)[1]
    assert accepted["ngram"] == 0
    assert accepted["lookahead"] >= 10


def test_outputs_have_the_law_of_the_dense_model(host: EngineHost, tiny_llama: Path) -> None:
    """Of a prompt of one token over and over, which may well go on: so the first guesses are accepted now and then."""
    oracle = load_oracle(tiny_llama)
    prompts = ([token_id] * 5 for token_id in range(256))
    prompt = next(it for it in prompts if it[0] in dense_logits(oracle, it)[-1].topk(TOP_K).indices.tolist())
    law, counts, num_accepted = law_of(tiny_llama, prompt), Counter[tuple[int, ...]](), 0
    options = {"scheduler__max_num_seqs": 64, "speculative__num_speculative_tokens": 2}
    host.load(looking_ahead(tiny_llama, 2, 3, **options))
    sampling = {"temperature": TEMPERATURE, "top_k": TOP_K, "max_tokens": LENGTH, "ignore_eos": True}
    for seed in range(20):
        for answer in submit_samples(host, "a", prompt, 64, seed=4000 + seed, **sampling).values():
            assert answer.finish_reason == "length"
            counts[tuple(answer.token_ids)] += 1
            num_accepted += answer.last.speculation.num_accepted_tokens if answer.last.speculation else 0
    assert set(counts) <= set(law)
    assert num_accepted > 50
    statistic, degrees = chi_square(counts, law)
    assert degrees > 20
    assert statistic < too_large(degrees)


def test_the_end_of_the_context_and_a_budget_without_room(host: EngineHost, tiny_llama: Path) -> None:
    """Of 56 tokens, 12 of which are a window's: 43 and a draft are the most with which there is a round."""
    prompt = prompts_of([38])
    expected = dense_greedy(tiny_llama, prompt["p38"], 18)
    info = host.load(looking_ahead(tiny_llama, model__max_model_len=56, cache__num_blocks=4))
    assert any("off for the last 13 tokens of the context" in notice for notice in info.notices)
    answer = answers(host, prompt, max_tokens=50, ignore_eos=True)["p38"]
    assert (answer.token_ids, answer.finish_reason) == (expected, "length")
    origins = [event.origins or [] for event in answer.events]
    begins = [38 + sum(map(len, origins[:place])) for place in range(len(origins))]
    assert all((begin <= 43 and begin > 38) == (each != ["plain"]) for begin, each in zip(begins, origins, strict=True))
    info = host.load(looking_ahead(tiny_llama, scheduler__max_num_batched_tokens=13))
    assert any("speculation is off: a step with a window has 14 tokens" in notice for notice in info.notices)
    assert rounds_of(answers(host, prompt, max_tokens=9))[0] == 0


def test_a_window_that_no_mask_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lookahead_window x \(lookahead_ngram - 1\) = 66 tokens .* 64 are the most"):
        looking_ahead("dummy:tiny", 15, 5)
    assert EngineConfig().with_overrides({"speculative.method": "lookahead"}).speculative.num_window_tokens == 56


def test_on_a_cpu_it_begins_switched_off_and_says_so(host: EngineHost, tiny_llama: Path) -> None:
    """A window of 56 tokens costs a CPU far more than a draft can bring."""
    info = host.load(config_of(tiny_llama, speculative__method="lookahead", speculative__adaptive=True))
    assert any("It begins switched off" in notice for notice in info.notices)
    collected = answers(host, PROMPTS, **GREEDY)
    assert rounds_of(collected)[0] <= 2 * len(PROMPTS)
