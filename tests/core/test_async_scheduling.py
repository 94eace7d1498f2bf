"""Steps scheduled before the results of earlier ones: the tokens are those of the synchronous run, and no block is lost.

The machine is real enough to notice a wrong block, a wrong position or a token that was not known yet (`PagedMachine`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.paged_machine import Lab, generate, next_token


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(50_000), k=length)


def expected_of(
    prompt: Sequence[int], limit: int, ending: frozenset[int] = frozenset(), min_tokens: int = 0
) -> tuple[list[int], str]:
    """The output of a request and how it ends, from the list alone."""
    output: list[int] = []
    while len(output) < limit:
        token_id = next_token([*prompt, *output])
        if token_id in ending and len(output) >= min_tokens:
            return output, "stop"
        output.append(token_id)
    return output, "length"


def test_one_step_ahead_keeps_a_decode_in_every_step() -> None:
    """The device never waits: each step after the prefill has the request, though the one before has no result yet."""
    lab = Lab(ahead=1)
    lab.add("a", prompt_of(5), max_tokens=6)
    lab.run()
    assert [dict(step.num_scheduled_tokens) for step in lab.steps] == [{"a": 5}, *[{"a": 1}] * 5]
    assert [step.num_computed_tokens for step in lab.steps] == [[0], [5], [6], [7], [8], [9]]


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_nothing_is_scheduled_beyond_the_last_possible_token(max_tokens: int, ahead: int) -> None:
    lab = Lab(ahead=ahead, num_blocks=4, block_size=4)
    request = lab.add("a", prompt_of(9), max_tokens=max_tokens)
    lab.run()
    assert sum(step.total_num_scheduled_tokens for step in lab.steps) == 9 + max_tokens - 1
    assert (lab.tokens["a"], lab.finished["a"]) == (generate(prompt_of(9), max_tokens), "length")
    assert request.num_placeholder_tokens == 0
    full = Lab(ahead=ahead, num_blocks=3, block_size=4)
    full.add("a", prompt_of(9), max_tokens=50)  # the longest request that the pool holds
    assert full.run()["a"] == generate(prompt_of(9), 3)


def test_an_end_that_was_not_foreseen_drops_what_is_in_flight() -> None:
    prompt = prompt_of(7)
    whole = generate(prompt, 5)
    lab = Lab(ahead=1)
    lab.add("a", prompt, 50, stop_token_ids=(whole[4],))
    lab.run()
    assert (lab.tokens["a"], lab.finished["a"]) == (whole[:4], "stop")
    wasted = sum(step.total_num_scheduled_tokens for step in lab.steps) - (7 + 4)
    assert wasted == 1, "the one step that ran ahead"


def test_an_id_is_used_again_while_its_last_owner_is_in_flight() -> None:
    """The late result under that id belongs to the owner that is over."""
    lab = Lab(ahead=1)
    first = lab.add("a", prompt_of(6, 1), 50)
    lab.step()
    lab.step()
    output = lab.scheduler.abort_request("a")
    assert output is not None
    lab.take(output)
    assert first.num_placeholder_tokens == 1
    del lab.finished["a"]
    second = lab.add("a", prompt_of(6, 2), 4)
    assert lab.run()["a"] == generate(prompt_of(6, 2), 4)
    assert second.token_ids == [*prompt_of(6, 2), *generate(prompt_of(6, 2), 4)]
    assert "a" in [request_id for step in lab.steps for request_id in step.finished_request_ids]


@pytest.mark.parametrize("end", ["abort", "error", "stop"])
def test_blocks_are_free_at_once_when_a_request_in_flight_ends(end: str) -> None:
    lab = Lab(ahead=1)
    prompt = prompt_of(8)
    whole = generate(prompt, 4)
    request = lab.add("a", prompt, 50, stop_token_ids=(whole[2],) if end == "stop" else ())
    if end == "error":
        lab.fail_at["a"] = 10
    while "a" not in lab.finished:
        lab.step()
        if end == "abort" and len(lab.tokens["a"]) == 2:
            output = lab.scheduler.abort_request("a")
            assert output is not None
            lab.take(output)
    assert lab.in_flight, "a later step was meant to hold it"
    assert lab.manager.num_blocks_of(request) == 0
    assert lab.manager.pool.num_free_blocks == lab.num_blocks
    assert lab.tokens["a"] == whole[:2]
    assert lab.finished["a"] == end
    lab.run()


def test_a_preempted_request_comes_back_only_with_all_its_tokens() -> None:
    lab = Lab(num_blocks=12, block_size=4, max_num_seqs=8, ahead=2)
    prompts = {str(index): prompt_of(6 + index, index) for index in range(6)}
    for key, prompt in prompts.items():
        lab.add(key, prompt, max_tokens=20)
    waited = 0
    while lab.scheduler.has_unfinished_requests():
        held_back = [request for request in lab.scheduler.waiting if request.num_placeholder_tokens]
        lab.step()
        assert not {request.request_id for request in held_back} & {
            new.request_id for new in lab.steps[-1].new_requests
        }
        waited += len(held_back)
    assert waited, "a request was meant to be preempted with a token on its way"
    assert lab.run() == {key: generate(prompt, 20) for key, prompt in prompts.items()}


def test_results_out_of_order_are_an_error() -> None:
    lab = Lab()
    lab.add("a", prompt_of(4))
    first, second = lab.scheduler.schedule(), lab.scheduler.schedule()
    outputs = [lab.machine.execute(first), lab.machine.execute(second)]
    with pytest.raises(RuntimeError, match="the result of step 1 came before that of step 0"):
        lab.scheduler.update_from_output(second, outputs[1])


def test_with_nothing_to_schedule_the_ends_are_told_later() -> None:
    """An output that is not carried out may not take the worker's news with it."""
    lab = Lab(ahead=1, max_num_seqs=1)
    lab.add("a", prompt_of(4), max_tokens=1)
    lab.step()
    idle = lab.scheduler.schedule()
    assert (idle.num_scheduled_tokens, idle.finished_request_ids) == ({}, [])
    lab.step()
    assert lab.finished == {"a": "length"}
    assert lab.scheduler.schedule().finished_request_ids == []
    lab.add("b", prompt_of(4), max_tokens=1)
    assert lab.run()["b"] == generate(prompt_of(4), 1)
    assert lab.steps[-1].finished_request_ids == ["a"]


class AheadMachine(RuleBasedStateMachine):
    """Arrivals, steps, late results and aborts in any order, against the lists alone."""

    @initialize(
        ahead=st.integers(1, 3),
        num_blocks=st.integers(8, 24),
        budget=st.sampled_from([1, 2, 5, 8, 64]),
        num_seqs=st.sampled_from([1, 2, 5, 8]),
    )
    def begin(self, ahead: int, num_blocks: int, budget: int, num_seqs: int) -> None:
        self.lab = Lab(
            num_blocks=num_blocks, block_size=4, max_num_seqs=num_seqs, max_num_batched_tokens=budget, ahead=ahead
        )
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.count = 0

    @rule(
        length=st.integers(1, 20),
        max_tokens=st.sampled_from([1, 2, 9, 40]),
        stop=st.one_of(st.none(), st.integers(0, 12)),
        min_tokens=st.sampled_from([0, 0, 1, 5]),
    )
    def arrive(self, length: int, max_tokens: int, stop: int | None, min_tokens: int) -> None:
        self.count += 1
        prompt, min_tokens = prompt_of(length, self.count), min(min_tokens, max_tokens)
        limit = min(max_tokens, self.lab.scheduler.max_model_len - length)
        ending = frozenset() if stop is None else frozenset(generate(prompt, stop + 1)[stop:])
        key = str(self.count)
        self.lab.add(key, prompt, max_tokens, min_tokens=min_tokens, stop_token_ids=tuple(ending))
        self.expected[key] = expected_of(prompt, limit, ending, min_tokens)

    @rule()
    def step(self) -> None:
        self.lab.step()

    @precondition(lambda self: self.lab.in_flight)
    @rule()
    def take_a_result(self) -> None:
        self.lab.complete()

    @precondition(lambda self: self.lab.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        output = self.lab.scheduler.abort_request(data.draw(st.sampled_from(sorted(self.lab.scheduler.requests))))
        assert output is not None
        self.lab.take(output)

    @invariant()
    def whole(self) -> None:
        self.lab.manager.check_integrity()
        for request in self.lab.scheduler.running:
            assert request.num_placeholder_tokens <= len(self.lab.in_flight)
            assert request.num_computed_tokens <= request.num_tokens + request.num_placeholder_tokens - 1 or (
                request.num_computed_tokens < request.num_prompt_tokens
            )
        for key, tokens in self.lab.tokens.items():
            assert tokens == self.expected[key][0][: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "lab"):
            return
        self.lab.run()
        for key, reason in self.lab.finished.items():
            if reason != "abort":
                assert (self.lab.tokens[key], reason) == self.expected[key]


TestAhead = AheadMachine.TestCase
TestAhead.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
