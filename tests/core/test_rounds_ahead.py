"""Rounds that are scheduled before the result of the last one is known: those that a worker goes on with by itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.paged_machine import generate
from tests.core.speculative_machine import SpeculativeLab
from tests.core.test_async_scheduling import prompt_of
from tests.core.test_speculative_scheduler import PROMPTS, SETTINGS


@pytest.mark.parametrize(
    ("how", "num_right"),
    [*(("drafts_ahead", count) for count in (0, 2, 5)), *(("looks_up", count) for count in (0, 2, 5, None))],
)
@pytest.mark.parametrize(
    "name", ["blocks of one", "blocks of four", "large blocks", "small pool", "prefix cache", "swapping"]
)
def test_rounds_are_repeated_before_the_last_one_is_known(how: str, name: str, num_right: int | None) -> None:
    """The machine writes what it accepts where the blocks say, which the scheduler must have given it beforehand.

    A head drafts all that it may.
    """
    options: dict[str, Any] = {how: True, "runs_ahead": True, "num_right": num_right} | SETTINGS[name]
    lab = SpeculativeLab(seed=2, **options)
    for key, prompt in PROMPTS.items():
        lab.add(key, prompt, max_tokens=27)
    assert lab.run() == {key: generate(prompt, 27) for key, prompt in PROMPTS.items()}
    repeated = [step for step in lab.steps if step.continues]
    assert repeated
    assert all(set(step.num_draft_tokens or {}) == set(step.num_scheduled_tokens) for step in repeated)
    assert all(not step.new_requests and not step.preempted_request_ids for step in repeated)


def test_rounds_in_which_look_ups_find_nothing_are_not_repeated() -> None:
    """Once that is known; the round behind it is under way by then."""
    lab = SpeculativeLab(looks_up=True, runs_ahead=True, num_right=0, num_blocks=400)
    for key in "ab":
        lab.add(key, prompt_of(3, ord(key)), max_tokens=60)
    while sum(step.continues for step in lab.steps) < 4:
        lab.step()
    lab.machine.finds_nothing_for = {"a", "b"}
    num_steps = len(lab.steps)
    while len(lab.steps) < num_steps + 9:
        lab.step()
    dry = lab.steps[num_steps:]
    assert [step.continues for step in dry[:2]].count(True) >= 1
    assert not any(step.continues for step in dry[2:])
    assert all(step.num_draft_tokens for step in dry), "the worker is asked again in each step"
    lab.machine.finds_nothing_for = set()
    assert lab.run() == {key: generate(prompt_of(3, ord(key)), 60) for key in "ab"}
    assert any(step.continues for step in lab.steps[num_steps + 9 :])


def test_rounds_in_which_look_ups_find_something_for_one_request_are_repeated_with_all() -> None:
    lab = SpeculativeLab(looks_up=True, runs_ahead=True, num_right=1, num_blocks=400)
    lab.machine.finds_nothing_for = {"b"}
    for key in "ab":
        lab.add(key, prompt_of(3, ord(key)), max_tokens=40)
    assert lab.run() == {key: generate(prompt_of(3, ord(key)), 40) for key in "ab"}
    assert {request_id for request_id, _, _ in lab.machine.rounds} == {"a"}
    assert sum(step.continues for step in lab.steps) > 5


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("how", ["drafts_ahead", "looks_up"])
def test_a_round_with_a_request_that_has_just_come_back_is_not_repeated(how: str, seed: int) -> None:
    """Its last token is the host's, which makes the round one that a worker does not carry on."""
    options: dict[str, Any] = {how: True, "num_blocks": 22 + seed // 2, "max_model_len": 80, "swap_blocks": 40}
    lab = SpeculativeLab(seed=seed, runs_ahead=True, num_right=5, num_speculative_tokens=3, **options)
    for index in range(2):
        lab.add(str(index), prompt_of(17, index), max_tokens=50)
    assert lab.run() == {str(index): generate(prompt_of(17, index), 50) for index in range(2)}
    back = [place for place, step in enumerate(lab.steps) if step.new_requests and step.num_draft_tokens]
    assert any(set(lab.steps[place].kinds.values()) == {"decode"} for place in back)
    assert not any(lab.steps[place + 1].continues for place in back)
    assert any(step.continues for step in lab.steps)
