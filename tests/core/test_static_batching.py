"""`scheduler.batching = static` against the closed form, and nobody joining a batch whatever happens to it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.analysis.batching import Schedule, compare_batching
from tests.core.paged_machine import Lab, generate


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(50_000), k=length)


def run(lab: Lab, output_lens: list[int], prompt_lens: list[int]) -> dict[str, list[int]]:
    """All waiting at the start; the tokens that are to be expected."""
    prompts = {str(index): prompt_of(length, index) for index, length in enumerate(prompt_lens)}
    for (key, prompt), max_tokens in zip(prompts.items(), output_lens, strict=True):
        lab.add(key, prompt, max_tokens)
    lab.run()
    return {key: generate(prompt, n) for (key, prompt), n in zip(prompts.items(), output_lens, strict=True)}


def assert_is(schedule: Schedule, lab: Lab) -> None:
    steps = [step.num_scheduled_tokens for step in lab.steps]
    assert len(steps) == schedule.num_steps
    assert sum(schedule.num_slots - len(rows) for rows in steps) == schedule.idle_slot_steps
    for index, (first, end) in enumerate(zip(schedule.first_steps, schedule.end_steps, strict=True)):
        assert [number for number, rows in enumerate(steps) if str(index) in rows] == list(range(first, end))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 12)), min_size=1, max_size=20),
    num_slots=st.integers(1, 6),
    layout=st.sampled_from(["paged", "contiguous"]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_steps_and_idle_slots_are_those_of_the_closed_form(
    lengths: list[tuple[int, int]], num_slots: int, layout: str, policy: str
) -> None:
    prompt_lens, output_lens = map(list, zip(*lengths, strict=True))
    expected = compare_batching(output_lens, num_slots)
    # A step has room for every prompt and the pool for every request.
    size = {"num_blocks": 60, "max_num_seqs": num_slots, "max_num_batched_tokens": 100, "max_model_len": 32}
    for batching, schedule in (("static", expected.static), ("continuous", expected.continuous)):
        lab = Lab(batching=batching, layout=layout, policy=policy, **size)  # type: ignore[arg-type]
        assert run(lab, output_lens, prompt_lens) == lab.tokens
        assert_is(schedule, lab)
    ahead = Lab(batching="static", layout=layout, policy=policy, ahead=1, **size)  # type: ignore[arg-type]
    assert run(ahead, output_lens, prompt_lens) == ahead.tokens
    assert_is(expected.static, ahead)


def test_who_arrives_during_a_batch_waits_for_its_longest_member() -> None:
    lab = Lab(batching="static", max_num_seqs=3)
    lab.add("long", prompt_of(4, 1), 6)
    lab.add("short", prompt_of(4, 2), 2)
    lab.step()
    for key in "xyz":
        lab.add(key, prompt_of(4, ord(key)), 1)
    lab.run()
    rows = [set(step.num_scheduled_tokens) for step in lab.steps]
    assert rows == [{"long", "short"}, {"long", "short"}, *[{"long"}] * 4, {"x", "y", "z"}]


def test_a_batch_has_as_many_as_the_pool_holds() -> None:
    """Blocks of 4: 3 + 3 + 2 fill the pool of 8. What the first two leave early is for the third alone."""
    lab = Lab(batching="static", num_blocks=8, block_size=4, max_num_seqs=8)
    for index, (length, max_tokens) in enumerate(((11, 1), (11, 1), (7, 4), (3, 1), (3, 1))):
        lab.add(str(index), prompt_of(length, index), max_tokens)
    lab.run()
    rows = [list(step.num_scheduled_tokens) for step in lab.steps]
    assert rows == [["0", "1", "2"], *[["2"]] * 3, ["3", "4"]]


def test_members_that_the_first_step_has_no_budget_for_follow_before_anybody_else() -> None:
    lab = Lab(batching="static", policy="priority", max_num_seqs=3, max_num_batched_tokens=4)
    for key in "abc":
        lab.add(key, prompt_of(2, ord(key)), 4)
    lab.step()
    assert list(lab.steps[0].num_scheduled_tokens) == ["a", "b"]
    lab.add("urgent", prompt_of(2), 1, priority=-1)
    lab.run()
    admitted = [new.request_id for step in lab.steps for new in step.new_requests]
    assert admitted == ["a", "b", "c", "urgent"]
    assert list(lab.steps[-1].num_scheduled_tokens) == ["urgent"]


def test_the_end_of_an_aborted_batch_lets_the_next_one_in() -> None:
    lab = Lab(batching="static", max_num_seqs=2)
    for key in "abcd":
        lab.add(key, prompt_of(4, ord(key)), 30)
    lab.step()
    for key in "ab":
        lab.step()
        assert set(lab.steps[-1].num_scheduled_tokens) <= {"a", "b"}
        output = lab.scheduler.abort_request(key)
        assert output is not None
        lab.take(output)
    lab.step()
    assert set(lab.steps[-1].num_scheduled_tokens) == {"c", "d"}
    lab.run()


@pytest.mark.parametrize("policy", ["fcfs", "prefill_first", "priority"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_nobody_joins_a_batch_in_a_pool_that_runs_out(policy: str, ahead: int) -> None:
    """Arrivals, aborts and preemption in between; who is in a batch is seen from outside, by who was there at its start."""
    num_preempted = 0
    for seed in range(8):
        rng = random.Random(seed)
        lab = Lab(
            num_blocks=rng.randint(10, 14),
            block_size=4,
            max_num_seqs=rng.choice([4, 8]),
            max_num_batched_tokens=rng.choice([3, 12, 64]),
            batching="static",
            policy=policy,
            ahead=ahead,
        )
        asked: dict[str, tuple[list[int], int]] = {}
        there: set[str] = set()  # when the batch was chosen
        batch: set[str] = set()
        while len(asked) < 25 or lab.scheduler.has_unfinished_requests():
            if len(asked) < 25 and rng.random() < 0.4:
                key = str(len(asked))
                asked[key] = prompt_of(rng.randint(1, 12), len(asked)), rng.randint(1, 20)
                lab.add(key, *asked[key], priority=rng.randint(0, 2))
            if lab.scheduler.requests and rng.random() < 0.02:
                output = lab.scheduler.abort_request(rng.choice(list(lab.scheduler.requests)))
                assert output is not None
                lab.take(output)
            unfinished, before = set(lab.scheduler.requests), len(lab.steps)
            lab.step()
            for step in lab.steps[before:]:
                num_preempted += len(step.preempted_request_ids)
                joining = {new.request_id for new in step.new_requests}
                if joining - batch:
                    if not batch & unfinished:
                        there, batch = unfinished, set()
                    assert joining <= there, "a request joined a batch that it was too late for"
                    batch |= joining
        lab.run()
        for key, tokens in lab.tokens.items():
            expected = generate(*asked[key])
            assert tokens == (expected[: len(tokens)] if lab.finished[key] == "abort" else expected)
    assert num_preempted > 0, "the pool was meant to run out"
