"""`scheduler.policy` against hand-made traces and against models that only count."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.paged_machine import Lab, generate

POLICIES = ["fcfs", "prefill_first", "priority"]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(50_000), k=length)


def rows_of(lab: Lab) -> list[dict[str, int]]:
    return [dict(step.num_scheduled_tokens) for step in lab.steps]


def test_three_policies_by_hand() -> None:
    """A decode runs, then two prompts arrive, the second more urgent; a step holds one of them, and little more."""
    rows = {}
    for policy in POLICIES:
        lab = Lab(policy=policy, max_num_batched_tokens=8, max_num_seqs=2)
        lab.add("d", prompt_of(3, 1), 4)
        lab.step()
        lab.add("p", prompt_of(6, 2), 1, priority=5)
        lab.add("q", prompt_of(6, 3), 1, priority=3)
        lab.run()
        rows[policy] = rows_of(lab)
    assert rows["fcfs"] == [{"d": 3}, {"d": 1, "p": 6}, {"d": 1, "q": 6}, {"d": 1}]
    assert rows["prefill_first"] == [{"d": 3}, {"p": 6}, {"q": 6}, {"d": 1}, {"d": 1}, {"d": 1}]
    assert rows["priority"] == [{"d": 3}, {"d": 1, "q": 6}, {"d": 1, "p": 6}, {"d": 1}]


# ---- prefill_first ----


def prefill_first_model(
    arrivals: dict[int, list[tuple[str, int, int]]], budget: int, num_slots: int
) -> list[dict[str, int]]:
    """Steps of an endless pool: prompts that fit in whole, the oldest first; decodes only when there are none.

    Args:
        arrivals: before which step come which (key, prompt tokens, output tokens).
    """
    waiting: deque[tuple[str, int, int]] = deque()
    left: dict[str, tuple[int, int]] = {}  # of the running ones: prompt tokens, output tokens
    steps: list[dict[str, int]] = []
    number = 0
    while number <= max(arrivals) or waiting or left:
        waiting.extend(arrivals.get(number, []))
        number += 1
        room, step = budget, {}
        for key in sorted(left, key=lambda key: left[key][0] != 1):  # a prompt's last token first: it holds nobody up
            size = left[key][0]
            if size and room and (size <= room or size > budget):
                step[key] = min(size, room)
                room -= step[key]
        while waiting and room and len(left) < num_slots:
            key, size, output = waiting[0]
            if room < size <= budget:
                break
            waiting.popleft()
            left[key] = size, output
            step[key] = min(size, room)
            room -= step[key]
        if not step:
            step = dict.fromkeys(left, 1)
        for key, count in step.items():
            size, output = left[key]
            size = max(0, size - count)
            left[key] = size, output - (size == 0)
            if left[key][1] == 0:
                del left[key]
        if step:
            steps.append(step)
    return steps


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=10),
    budget=st.integers(7, 40),
    num_slots=st.integers(1, 7),
)
def test_prefill_first_runs_the_steps_of_the_model(
    requests: list[tuple[int, int, int]], budget: int, num_slots: int
) -> None:
    """With a budget for every decode; long prompts are cut only where they are longer than a whole step."""
    arrivals: dict[int, list[tuple[str, int, int]]] = {}
    for index, (before, size, output) in enumerate(sorted(requests)):
        arrivals.setdefault(before, []).append((str(index), size, output))
    lab = Lab(policy="prefill_first", num_blocks=200, max_num_batched_tokens=budget, max_num_seqs=num_slots)
    number = 0
    while number <= max(arrivals) or lab.scheduler.has_unfinished_requests():
        for key, size, output in arrivals.get(number, []):
            lab.add(key, prompt_of(size, int(key)), output)
        number += 1
        lab.step()
    assert rows_of(lab) == prefill_first_model(arrivals, budget, num_slots)


@pytest.mark.parametrize("policy", POLICIES)
def test_only_prefill_first_starves_decodes_while_prompts_keep_arriving(policy: str) -> None:
    """The fault itself, on purpose (sgl-project/sglang#32549)."""
    lab = Lab(policy=policy, num_blocks=4000, max_num_seqs=300, max_num_batched_tokens=64, max_model_len=256)
    lab.add("d", prompt_of(5), 40)
    lab.step()
    for index in range(30):
        lab.add(str(index), prompt_of(64, index), 2)
        lab.step()
    assert len(lab.tokens["d"]) == (1 if policy == "prefill_first" else 31)
    assert lab.run()["d"] == generate(prompt_of(5), 40), "it goes on once no more come"


# ---- priority ----


@pytest.mark.parametrize("budget", [4, 16, 200])
def test_the_best_waiting_one_is_admitted_and_the_worst_running_one_preempted(budget: int) -> None:
    num_preempted = 0
    for seed in range(10):
        rng = random.Random(seed)
        lab = Lab(policy="priority", num_blocks=14, block_size=4, max_num_seqs=6, max_num_batched_tokens=budget)
        ranks: dict[str, tuple[int, int]] = {}  # priority, order of arrival
        asked: dict[str, tuple[list[int], int]] = {}
        while len(asked) < 20 or lab.scheduler.has_unfinished_requests():
            if len(asked) < 20 and rng.random() < 0.5:
                key = str(len(asked))
                asked[key] = prompt_of(rng.randint(1, 14), len(asked)), rng.randint(1, 24)
                ranks[key] = rng.randint(-2, 2), len(asked)
                lab.add(key, *asked[key], priority=ranks[key][0])
            before = len(lab.steps)
            lab.step()
            for step in lab.steps[before:]:
                waiting = {request.request_id for request in lab.scheduler.waiting}
                running = set(lab.scheduler.requests) - waiting
                preempted = [ranks[key] for key in step.preempted_request_ids]
                for new in step.new_requests:
                    assert all(ranks[new.request_id] < ranks[key] for key in waiting)
                assert all(rank > ranks[key] for rank in preempted for key in running)
                assert preempted == sorted(preempted, reverse=True)
                num_preempted += len(preempted)
        lab.run()
        assert lab.tokens == {key: generate(*ask) for key, ask in asked.items()}
    assert num_preempted > 0, "the pool was meant to run out"


def test_a_budget_too_small_for_all_serves_the_best_decodes_and_equals_in_turn() -> None:
    lab = Lab(policy="priority", max_num_seqs=5, max_num_batched_tokens=3, num_blocks=100)
    for index, priority in enumerate((7, 1, 7, 1, 1)):
        lab.add(f"{'good' if priority == 1 else 'bad'}{index}", prompt_of(1, index), 12, priority=priority)
    while not all(lab.tokens.values()):
        lab.step()
    start = len(lab.steps)
    while not any(key.startswith("good") for key in lab.finished):
        lab.step()
    for rows in rows_of(lab)[start:]:
        assert set(rows) == {"good1", "good3", "good4"}


def test_the_better_prompt_is_prefilled_first() -> None:
    """The one admitted later takes over the rest of the budget, whatever the first still needs."""
    lab = Lab(policy="priority", max_num_batched_tokens=8, num_blocks=100)
    lab.add("late", prompt_of(40, 1), 1, priority=1)
    lab.step()
    lab.add("urgent", prompt_of(40, 2), 1, priority=0)
    lab.run()
    assert list(lab.finished) == ["urgent", "late"]


def test_a_running_request_is_not_preempted_for_a_better_one_that_waits() -> None:
    lab = Lab(policy="priority", max_num_seqs=1)
    lab.add("poor", prompt_of(4, 1), 6, priority=9)
    lab.step()
    lab.add("good", prompt_of(4, 2), 2, priority=0)
    lab.run()
    assert list(lab.finished) == ["poor", "good"]


def test_the_worst_starves_while_better_ones_keep_coming() -> None:
    lab = Lab(policy="priority", max_num_seqs=1)
    lab.add("worst", prompt_of(4), 2, priority=1)
    for index in range(50):
        lab.add(str(index), prompt_of(4, index), 1)
        lab.step()
    assert len(lab.finished) == 50
    assert not lab.tokens["worst"]
    lab.run()
    assert list(lab.finished)[-1] == "worst"


# ---- all ----


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_tokens_do_not_depend_on_the_policy(policy: str, budget: int, ahead: int) -> None:
    """Small budgets, a pool that runs out, common beginnings, results that come late."""
    rng = random.Random(budget)
    lab = Lab(
        policy=policy,
        num_blocks=12,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        ahead=ahead,
        prefix_caching=True,
    )
    stem = prompt_of(9)
    asked = {str(index): (stem[: rng.randint(0, 9)] + prompt_of(rng.randint(1, 9), index), 20) for index in range(12)}
    for key, ask in asked.items():
        lab.add(key, *ask, priority=rng.randint(0, 3))
        lab.step()
    assert lab.run() == {key: generate(*ask) for key, ask in asked.items()}
    if budget > 1:
        assert any(step.preempted_request_ids for step in lab.steps), "the pool was meant to run out"
