"""Drafts in the scheduler: the tokens are those of plain decoding, and drafts cost nobody anything but what is left over."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.core.draft_cost import DraftCost
from backend.core.output import ModelRunnerOutput
from tests.core.paged_machine import Lab, generate
from tests.core.speculative_machine import SpeculativeLab
from tests.core.test_async_scheduling import expected_of, prompt_of

PROMPTS = {f"p{length}": prompt_of(length) for length in (1, 3, 4, 5, 8, 17, 40)}

SETTINGS: dict[str, dict[str, Any]] = {
    "blocks of one": {"block_size": 1, "num_blocks": 400},
    "blocks of four": {"block_size": 4, "num_blocks": 200},
    "large blocks": {"block_size": 16, "num_blocks": 60},
    "prefix cache": {"prefix_caching": True, "num_blocks": 100},
    "small pool": {"num_blocks": 22, "max_model_len": 70},
    "small pool with prefix cache": {"num_blocks": 22, "max_model_len": 70, "prefix_caching": True},
    "swapping": {"num_blocks": 22, "max_model_len": 70, "swap_blocks": 30},
    "contiguous": {"layout": "contiguous", "num_blocks": 60, "max_model_len": 70},
    "static": {"batching": "static", "max_num_seqs": 3},
    "prefill first": {"policy": "prefill_first", "max_num_batched_tokens": 20},
    "a budget of one": {"max_num_batched_tokens": 1, "num_blocks": 200},
    "a budget of seven": {"max_num_batched_tokens": 7, "num_blocks": 200},
    "a window": {"windows": (8,), "num_blocks": 60, "max_model_len": 70},
    "two groups": {"windows": (None, 6), "num_blocks": 120, "max_model_len": 70},
    "two groups with prefix cache": {
        "windows": (None, 6),
        "num_blocks": 120,
        "max_model_len": 70,
        "prefix_caching": True,
    },
}

AHEAD: tuple[dict[str, Any], ...] = ({}, {"drafts_ahead": True}, {"looks_up": True})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_plain_decoding(name: str, seed: int) -> None:
    options = SETTINGS[name]
    lab = SpeculativeLab(seed=seed, **options)
    for key, prompt in PROMPTS.items():
        lab.add(key, prompt, max_tokens=20)
    windows = options.get("windows", (None,))
    assert lab.run() == {key: generate(prompt, 20, windows=windows) for key, prompt in PROMPTS.items()}
    assert set(lab.finished.values()) == {"length"}
    drafted = any(count for _, count, _ in lab.machine.rounds)
    assert drafted == (name != "a budget of one")


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_plain_decoding_with_windows_behind_the_drafts(name: str) -> None:
    lab = SpeculativeLab(seed=1, lookahead=(4, 3), **SETTINGS[name])
    for key, prompt in PROMPTS.items():
        lab.add(key, prompt, max_tokens=20)
    windows = SETTINGS[name].get("windows", (None,))
    assert lab.run() == {key: generate(prompt, 20, windows=windows) for key, prompt in PROMPTS.items()}
    assert bool(lab.machine.rounds) == (name not in ("a budget of one", "a budget of seven"))


@pytest.mark.parametrize(
    "name", ["blocks of four", "large blocks", "small pool", "swapping", "contiguous", "two groups"]
)
def test_tokens_are_those_of_plain_decoding_with_the_next_draft_made_ahead(name: str) -> None:
    lab = SpeculativeLab(seed=2, drafts_ahead=True, **SETTINGS[name])
    for key, prompt in PROMPTS.items():
        lab.add(key, prompt, max_tokens=20)
    windows = SETTINGS[name].get("windows", (None,))
    assert lab.run() == {key: generate(prompt, 20, windows=windows) for key, prompt in PROMPTS.items()}


@pytest.mark.parametrize("only_in_graphs", [False, True])
def test_where_rounds_without_a_graph_do_not_pay_nobody_drafts_beside_prompts(only_in_graphs: bool) -> None:
    lab = SpeculativeLab(draft_cost=DraftCost(only_in_graphs=only_in_graphs), max_num_batched_tokens=24)
    lab.add("a", prompt_of(9), max_tokens=60)
    for _ in range(3):
        lab.step()
    lab.add("b", prompt_of(40, 1), max_tokens=20)
    assert lab.run() == {"a": generate(prompt_of(9), 60), "b": generate(prompt_of(40, 1), 20)}
    beside = [
        step for step in lab.steps if "a" in step.kinds and "prefill" in step.kinds.values() and len(step.kinds) > 1
    ]
    assert len(beside) > 1
    assert any(step.num_draft_tokens for step in beside) != only_in_graphs
    assert sum(bool(step.num_draft_tokens) for step in lab.steps) > len(beside)


@pytest.mark.parametrize("num_right", [0, 3, 5])
def test_a_draft_that_is_made_ahead_has_slots_and_costs_nobody_a_preemption(num_right: int) -> None:
    """Of a draft of five behind what was accepted, four are written, but none beyond the request's end."""
    lab = SpeculativeLab(drafts_ahead=True, num_right=num_right, block_size=4, num_blocks=200)
    request = lab.add("a", prompt_of(9), max_tokens=60)
    while lab.scheduler.has_unfinished_requests():
        lab.step()
        if "a" in lab.scheduler.requests and (lab.steps[-1].num_draft_tokens or {}).get("a") == 5:
            assert request.num_slots >= min(request.num_computed_tokens + 4, request.max_num_tokens)
    assert lab.tokens["a"] == generate(prompt_of(9), 60)

    def preemptions(ahead: bool) -> list[int]:
        lab = SpeculativeLab(drafts_ahead=ahead, num_right=num_right, block_size=4, num_blocks=24, max_model_len=70)
        requests = [lab.add(str(index), prompt_of(7, index), max_tokens=24) for index in range(3)]
        lab.run()
        return [request.num_preemptions for request in requests]

    assert preemptions(True) == preemptions(False) == [0, 0, 0], "24 blocks hold three requests of 31 tokens"


def test_a_window_runs_whole_or_not_at_all() -> None:
    """Beside at least one draft, within the budget's share and the context; beyond a request's own end it may reach."""
    lab = SpeculativeLab(lookahead=(4, 3), num_right=0, num_blocks=200, max_model_len=40, max_num_batched_tokens=24)
    lab.add("a", prompt_of(9), max_tokens=6)
    assert lab.run()["a"] == generate(prompt_of(9), 6)
    assert [step.num_draft_tokens for step in lab.steps] == [None, *({"a": 8 + count} for count in (4, 3, 2, 1)), None]
    lab.add("end", prompt_of(24), max_tokens=100)
    assert lab.run()["end"] == generate(prompt_of(24), 16)
    granted = [step.num_draft_tokens for step in lab.steps[6:]]
    counts = [13, 13, 13, 12, 11, 10, 9]  # with 27 tokens and 13 the context is full
    assert granted == [None, *({"end": count} for count in counts), *[None] * 8]
    for key in "bc":
        lab.add(key, prompt_of(3, ord(key)), max_tokens=10)
    num_steps = len(lab.steps)
    lab.run()
    assert lab.steps[num_steps + 1].num_draft_tokens == {"b": 11, "c": 11}, "22 are left beside their tokens"
    for key in "def":
        lab.add(key, prompt_of(3, ord(key)), max_tokens=10)
    num_steps = len(lab.steps)
    lab.run()
    assert lab.steps[num_steps + 1].num_draft_tokens == {"e": 11, "f": 10}, "a third of 21 holds no window"


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6))
@example(1861)  # a prompt beside a round is aborted before the round's result is known
def test_random_traffic_with_aborts_and_stops(seed: int) -> None:
    """Small pools, stops anywhere in a block of accepted tokens, aborts between any two steps."""
    rng = random.Random(seed)
    lab = SpeculativeLab(
        seed=seed,
        num_blocks=rng.randint(12, 40),
        block_size=rng.choice([1, 2, 4]),
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice([1, 2, 5, 9, 30]),
        num_speculative_tokens=rng.randint(1, 7),
        prefix_caching=rng.random() < 0.5,
        swap_blocks=rng.choice([0, 0, 20]),
        policy=rng.choice(["fcfs", "prefill_first"]),
        **rng.choice(AHEAD),
        runs_ahead=rng.random() < 0.5,
        num_right=rng.choice([None, 0, 2, 7]),
    )
    longest = lab.scheduler.max_model_len
    expected: dict[str, tuple[list[int], str]] = {}
    shared = prompt_of(max(1, longest // 3), 5)
    for index in range(rng.randint(1, 9)):
        prompt = shared[: rng.randint(1, len(shared))] + prompt_of(rng.randint(0, longest // 3), rng.randint(0, 2))
        prompt = prompt[: longest - 1]
        limit, min_tokens = rng.randint(1, 25), rng.choice([0, 0, 3])
        whole = generate(prompt, limit)
        ending = frozenset(rng.sample(whole, min(len(whole), rng.choice([0, 1, 2]))))
        limit, min_tokens = max(limit, min_tokens), min(limit, min_tokens)
        request = lab.add(str(index), prompt, limit, eos_token_ids=ending, min_tokens=min_tokens)
        expected[str(index)] = expected_of(prompt, request.max_num_tokens - len(prompt), ending, min_tokens)
    aborted = set()
    for _ in range(2000):
        if not lab.scheduler.has_unfinished_requests():
            break
        lab.step()
        if rng.random() < 0.03 and lab.scheduler.requests:
            key = rng.choice(list(lab.scheduler.requests))
            lab.abort(key)
            aborted.add(key)
    lab.run()
    for key, (tokens, reason) in expected.items():
        if key in aborted:
            assert lab.tokens[key] == tokens[: len(lab.tokens[key])]
        else:
            assert (lab.tokens[key], lab.finished[key]) == (tokens, reason)


@pytest.mark.parametrize(("num_right", "num_steps"), [(5, 4), (2, 7), (0, 19)])
def test_a_round_takes_what_was_accepted_and_one_token_more(num_right: int, num_steps: int) -> None:
    """19 tokens behind the first one: in steps of six, of three and of one."""
    lab = SpeculativeLab(num_right=num_right)
    lab.add("a", prompt_of(9), max_tokens=20)
    assert lab.run()["a"] == generate(prompt_of(9), 20)
    assert len(lab.steps) == 1 + num_steps


def test_nothing_is_drafted_beyond_the_last_possible_token() -> None:
    lab = SpeculativeLab(num_right=5, block_size=4, num_blocks=4)  # 16 tokens at most
    lab.add("a", prompt_of(7), max_tokens=100)
    assert lab.run()["a"] == generate(prompt_of(7), 9)
    assert [step.num_draft_tokens for step in lab.steps] == [None, {"a": 5}, {"a": 1}]
    short = SpeculativeLab(num_right=5)
    short.add("a", prompt_of(7), max_tokens=4)
    short.run()
    assert [step.num_draft_tokens for step in short.steps] == [None, {"a": 2}]


def test_drafts_take_what_is_left_of_the_budget_in_equal_parts() -> None:
    lab = SpeculativeLab(max_num_batched_tokens=12, num_right=0, num_blocks=200)
    for key in "abc":
        lab.add(key, prompt_of(3, ord(key)), max_tokens=30)
    while not all(lab.tokens.values()):
        lab.step()
    lab.step()
    assert lab.steps[-1].num_draft_tokens == {"a": 3, "b": 3, "c": 3}
    lab.add("prompt", prompt_of(7, 9), max_tokens=5)
    lab.step()
    assert lab.steps[-1].num_scheduled_tokens["prompt"] == 7, "a prompt comes before drafts"
    assert lab.steps[-1].num_draft_tokens == {"a": 1, "b": 1}


def test_drafts_are_dropped_before_anybody_is_preempted() -> None:
    """With and without drafts the same requests are preempted as often."""

    def preemptions(lab: Lab) -> int:
        for key in "ab":
            lab.add(key, prompt_of(8, ord(key)), max_tokens=8)
        lab.run()
        return sum(len(step.preempted_request_ids) for step in lab.steps)

    options: dict[str, Any] = {"num_blocks": 8, "block_size": 4, "max_num_seqs": 2}
    assert preemptions(Lab(**options)) == 0, "both fit exactly"
    lab = SpeculativeLab(num_right=0, **options)
    assert preemptions(lab) == 0
    assert lab.machine.rounds


def test_nobody_drafts_above_the_largest_batch() -> None:
    lab = SpeculativeLab(max_batch=2, num_right=0, num_blocks=200)
    for key, count in (("a", 12), ("b", 12), ("c", 4)):
        lab.add(key, prompt_of(3, ord(key)), max_tokens=count)
    lab.run()
    for step in lab.steps:
        decodes = sum(kind == "decode" for kind in step.kinds.values())
        assert decodes <= 2 or step.num_draft_tokens is None
    assert lab.machine.rounds


def test_rejected_tokens_are_never_found_by_others() -> None:
    """A draft of a whole block that was wrong: a prompt that goes on like it finds nothing there."""
    lab = SpeculativeLab(prefix_caching=True, num_right=0, block_size=4, num_speculative_tokens=7)
    prompt = prompt_of(4)
    lab.add("a", prompt, max_tokens=2)
    tokens = lab.run()["a"]
    drafted = [*prompt, tokens[0]]
    for _ in range(7):
        drafted.append((generate(drafted, 1)[0] + 1) % 50_000)
    request = lab.add("b", [*drafted, 1], max_tokens=1)
    lab.run()
    assert request.num_cached_tokens == 4


def test_origins_say_where_each_token_comes_from() -> None:
    lab = SpeculativeLab(num_right=2, num_speculative_tokens=3, num_blocks=100)
    lab.add("a", prompt_of(5), max_tokens=8)
    outputs = []
    while lab.scheduler.has_unfinished_requests():
        outputs += lab.step()
    round_of_three = ["accepted", "accepted", "recovered"]
    assert [it.origins for it in outputs] == [["plain"], round_of_three, round_of_three, ["plain"]]
    assert [it.num_draft_tokens for it in outputs] == [0, 3, 3, 0]


def test_a_request_that_fails_in_a_round_ends_alone() -> None:
    lab = SpeculativeLab(num_right=1, num_blocks=100)
    lab.add("a", prompt_of(5), max_tokens=10)
    lab.add("b", prompt_of(6), max_tokens=10)
    lab.step()
    scheduled = lab.scheduler.schedule()
    output: ModelRunnerOutput = lab.machine.execute(scheduled)
    del output.sampled_token_ids["a"]
    output.errors["a"] = "logits are not finite"
    outputs = {it.request_id: it for it in lab.scheduler.update_from_output(scheduled, output)}
    assert (outputs["a"].finish_reason, outputs["a"].new_token_ids) == ("error", [])
    lab.take(outputs["a"])
    lab.take(outputs["b"])
    assert lab.run()["b"] == generate(prompt_of(6), 10)
