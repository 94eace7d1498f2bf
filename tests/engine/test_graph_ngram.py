"""Drafts from the text in CUDA graphs: the first of rounds that follow each other by the host, the others by the device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from backend.core.scheduler_factory import make_scheduler
from backend.engine import llm_engine
from backend.engine.engine_host import EngineHost
from backend.metrics.speculation_ledger import Round
from backend.worker.model_runner import ModelRunner
from tests.engine.driving import answers, config_of, held, submit
from tests.engine.few_tokens import VOCAB_SIZE
from tests.engine.heads import answers_and_rounds
from tests.engine.looking_up import (
    CIRCLE,
    GREEDY,
    OPTIONS,
    PROMPTS,
    check_drafts,
    circle,
    count_rounds,
)
from tests.engine.scripted import make_scripted
from tests.helpers import dense_greedy, load_oracle, make_tiny_model
from tests.spec_decode.tiny_heads import random_ids

ADAPTIVE = "off where it loses"
MATRIX: dict[str, dict[str, Any]] = {
    "as ever": {},
    "chunks": {"scheduler__max_num_batched_tokens": 16, "cache__block_size": 4},
    "blocks of one": {"cache__block_size": 1},
    "preempted": {"cache__num_blocks": 8, "scheduler__preemption": "recompute"},
    "swapped": {"cache__num_blocks": 8, "scheduler__preemption": "swap"},
    "without prefix cache": {"cache__enable_prefix_caching": False},
    ADAPTIVE: {"speculative__adaptive": True},
    "drafts of three": {"speculative__num_speculative_tokens": 3},
    "ends of two and three": {"speculative__ngram_min": 2},
}


@pytest.fixture
def calls(replays: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_rounds(monkeypatch)


@pytest.fixture(scope="module")
def expected(few_tokens: Path) -> dict[str, list[int]]:
    oracle = load_oracle(few_tokens)
    return {key: dense_greedy(oracle, prompt, 48) for key, prompt in PROMPTS.items()}


@pytest.mark.parametrize("name", MATRIX)
def test_tokens_are_those_of_plain_decoding_and_drafts_what_the_text_says(
    graph_host: EngineHost,
    replays: Counter[str],
    calls: Counter[str],
    few_tokens: Path,
    expected: dict[str, list[int]],
    name: str,
) -> None:
    """Twice, with and without a prefix in the cache."""
    graph_host.load(config_of(few_tokens, **OPTIONS | MATRIX[name]))
    for _ in range(2):
        collected, rounds = answers_and_rounds(graph_host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
        check_drafts(PROMPTS, collected, rounds, MATRIX[name].get("speculative__ngram_min", 1))
        assert any(it.num_accepted for it in rounds)
        if name in ("preempted", "swapped"):
            assert sum(answer.last.num_preemptions or 0 for answer in collected.values()) > 0
    if name != ADAPTIVE:  # of seven at once hardly everybody drafts as before; see below for a request by itself
        assert calls["repeat"] > 5
    assert replays["round_graphs"] > 10


def test_the_record_is_that_of_an_engine_without_graphs(
    graph_host: EngineHost, calls: Counter[str], few_tokens: Path
) -> None:
    """Rounds, origins and counts of each request, all of whose tokens occurred before; only the steps are other ones."""
    prompts = {
        key: [*random_ids(VOCAB_SIZE, 9, seed=7).tolist(), *range(VOCAB_SIZE), *ids] for key, ids in PROMPTS.items()
    }
    options = OPTIONS | {"model__max_model_len": 192}

    def record() -> list[Any]:
        collected, rounds = answers_and_rounds(graph_host, prompts, **GREEDY)
        check_drafts(prompts, collected, rounds)
        of_requests = [[_without_step(it) for it in rounds if it.request_id == key] for key in prompts]
        events = [
            (answer.last.speculation, [(event.token_ids, event.origins) for event in answer.events])
            for answer in collected.values()
        ]
        return [of_requests, events]

    graph_host.load(config_of(few_tokens, **options))
    with_graphs = record()
    assert calls["repeat"] > 10
    graph_host.unload()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "capture_cuda_graphs", lambda *args: None)
        patch.setattr(llm_engine, "make_scheduler", make_scheduler)
        graph_host.load(config_of(few_tokens, **options))
    calls.clear()
    assert record() == with_graphs
    assert not calls


def _without_step(it: Round) -> tuple[Any, ...]:
    probs = [round(prob, 2) for prob in it.target_probs]
    return it.position, it.draft_token_ids, probs, it.accept_probs, it.num_accepted, it.token_id, it.num_emitted


def test_rounds_follow_each_other_without_the_host(graph_host: EngineHost, calls: Counter[str], circling: Path) -> None:
    """All but the first two, as long as the text repeats itself: that the first had drafts is not known behind it."""
    graph_host.load(config_of(circling, **OPTIONS | {"model__max_model_len": 192}))
    answer = answers(graph_host, {"a": circle(0, 45)}, max_tokens=61, ignore_eos=True)["a"]
    assert answer.token_ids == circle(45, 61)
    assert answer.last.speculation == (10, 50, 50)
    assert [len(event.token_ids) for event in answer.events] == [1, *[6] * 10]
    assert (calls["run"], calls["repeat"]) == (2, 8)


def test_rounds_follow_each_other_where_lengths_are_adaptive(
    graph_host: EngineHost, calls: Counter[str], circling: Path
) -> None:
    graph_host.load(config_of(circling, **OPTIONS | MATRIX[ADAPTIVE] | {"model__max_model_len": 192}))
    answer = answers(graph_host, {"a": circle(0, 45)}, max_tokens=61, ignore_eos=True)["a"]
    assert answer.token_ids == circle(45, 61)
    assert calls["repeat"] > 5


def test_where_nothing_is_found_steps_are_plain_again(
    graph_host: EngineHost, replays: Counter[str], calls: Counter[str], tmp_path: Path
) -> None:
    """The text has its first eight letters before it, and none of the rest: one round, and a step behind it that is plain.

    What is scheduled behind that, before its result, is no round either.
    """
    letters = list(range(20, 60))
    model = make_scripted(tmp_path / "model", [letters])
    graph_host.load(config_of(model, **OPTIONS))
    replays.clear()
    answer = answers(graph_host, {"a": [*letters[:7], letters[0]]}, max_tokens=30, ignore_eos=True)["a"]
    assert answer.token_ids == letters[1:31]
    assert answer.last.speculation == (1, 5, 5)
    assert replays["round_graphs"] == 2
    assert replays["decode_graphs"] == 30 - 1 - 6
    assert (calls["run"], calls["repeat"]) == (1 + 21, 1)


def test_a_round_that_is_gone_on_with_may_find_nothing(
    graph_host: EngineHost, replays: Counter[str], calls: Counter[str], tmp_path: Path
) -> None:
    """Two, for that of the first is not known before the second begins; then steps are plain."""
    letters = list(range(20, 90))
    model = make_scripted(tmp_path / "model", [letters])
    graph_host.load(config_of(model, **OPTIONS))
    replays.clear()
    prompts = {"a": [*letters[:31], letters[0]]}
    collected, rounds = answers_and_rounds(graph_host, prompts, max_tokens=45, ignore_eos=True)
    assert collected["a"].token_ids == letters[1:46]
    check_drafts(prompts, collected, rounds)
    assert [it.num_accepted for it in rounds] == [5] * 4 + [5, 0][: len(rounds) - 4]
    verified = replays["round_graphs"] // 2
    assert verified - len(rounds) == 2
    assert calls["repeat"] == verified - 2
    assert replays["decode_graphs"] == 45 - 1 - sum(it.num_emitted for it in rounds) - 2


def test_requests_with_and_without_drafts_share_rounds(
    graph_host: EngineHost, calls: Counter[str], tmp_path: Path
) -> None:
    """One repeats itself all along, and one does so from its second half on; both go on by themselves."""
    rising = list(range(100, 150))
    model = make_scripted(tmp_path / "model", [[*CIRCLE, CIRCLE[0]], [*rising, rising[20]]])
    graph_host.load(config_of(model, **OPTIONS | {"model__max_model_len": 400}))
    prompts = {"circle": circle(0, 45), "rising": rising[:2]}
    with held(graph_host):
        both = {
            "circle": submit(graph_host, "circle", prompts["circle"], max_tokens=350, ignore_eos=True),
            "rising": submit(graph_host, "rising", prompts["rising"], max_tokens=100, ignore_eos=True),
        }
    assert {answer.finish_reason for answer in both.values()} == {"length"}
    assert both["circle"].token_ids == circle(45, 350)
    assert both["rising"].token_ids == [*rising[2:], *rising[20:], *rising[20:]][:100]
    # The first token, and those up to the first that has been there before.
    assert Counter(origin for event in both["rising"].events for origin in event.origins or ()) == {
        "plain": 49,
        "accepted": 42,
        "bonus": 9,
    }
    assert both["circle"].last.speculation == (58, 290, 290)
    assert calls["repeat"] > 50


def test_who_may_have_longer_drafts_finds_some_in_a_round_of_shorter_ones(
    graph_host: EngineHost, calls: Counter[str], tmp_path: Path
) -> None:
    """A budget of seven leaves three drafts to the first request, which has none at first, and two to the other one."""
    rising = list(range(100, 150))
    model = make_scripted(tmp_path / "model", [[*CIRCLE, CIRCLE[0]], [*rising, rising[20]]])
    options = OPTIONS | {"model__max_model_len": 400, "scheduler__max_num_batched_tokens": 7}
    graph_host.load(config_of(model, **options))
    prompts = {"circle": circle(0, 45), "rising": rising[:2]}
    with held(graph_host):
        first = submit(graph_host, "rising", prompts["rising"], max_tokens=100, ignore_eos=True)
        other = submit(graph_host, "circle", prompts["circle"], max_tokens=200, ignore_eos=True)
    assert (first.finish_reason, first.token_ids) == ("length", [*rising[2:], *rising[20:], *rising[20:]][:100])
    assert (other.finish_reason, other.token_ids) == ("length", circle(45, 200))
    assert {len(event.token_ids) for event in first.events[:-2]} == {1, 4}
    assert {len(event.token_ids) for event in other.events[1:20]} == {3}
    assert calls["repeat"] > 20


def test_two_kv_groups(graph_host: EngineHost, calls: Counter[str], tmp_path: Path) -> None:
    changes = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    model = make_tiny_model(tmp_path / "model", "Qwen2", **changes)
    graph_host.load(config_of(model, **OPTIONS, cache__block_size=4))
    collected, rounds = answers_and_rounds(graph_host, PROMPTS, **GREEDY)
    for key, prompt in PROMPTS.items():
        assert collected[key].token_ids == dense_greedy(model, prompt, 48)
    check_drafts(PROMPTS, collected, rounds)
    assert calls["repeat"] > 3


@pytest.mark.parametrize("options", [{"scheduler__async_scheduling": False}, {"speculative__method": "draft_model"}])
def test_others_wait_for_the_host(
    graph_host: EngineHost,
    calls: Counter[str],
    few_tokens: Path,
    expected: dict[str, list[int]],
    options: dict[str, Any],
) -> None:
    graph_host.load(config_of(few_tokens, **OPTIONS | options))
    collected = answers(graph_host, PROMPTS, **GREEDY)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert calls["run"] > 5
    assert not calls["repeat"]
