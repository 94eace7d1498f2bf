from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.analysis.batching import Schedule, compare_batching
from tests.analysis.arithmetic import evaluate

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=25)


class Simulation:
    """Steps one by one, as a server would: fill free slots, run each, count."""

    def __init__(
        self,
        policy: Literal["static", "continuous"],
        output_lens: list[int],
        num_slots: int,
        prompt_lens: list[int] | None = None,
        chunk: int | None = None,
    ) -> None:
        prompts = list(prompt_lens or [1] * len(output_lens))
        outputs = list(output_lens)
        waiting = list(range(len(outputs)))
        running: list[int | None] = [None] * num_slots
        count = len(outputs)
        self.slots, self.first_steps, self.end_steps = [-1] * count, [-1] * count, [-1] * count
        self.num_steps = self.used = self.idle = 0
        while waiting or any(request is not None for request in running):
            if policy == "continuous" or all(request is None for request in running):
                for slot in range(num_slots):
                    if running[slot] is None and waiting:
                        request = running[slot] = waiting.pop(0)
                        self.slots[request], self.first_steps[request] = slot, self.num_steps
            self.num_steps += 1
            for slot, request in enumerate(running):
                if request is None:
                    self.idle += 1
                    continue
                self.used += 1
                prompts[request] -= chunk or prompts[request]
                if prompts[request] <= 0:
                    prompts[request] = 0
                    outputs[request] -= 1
                if outputs[request] == 0:
                    running[slot] = None
                    self.end_steps[request] = self.num_steps


def assert_same(schedule: Schedule, simulation: Simulation) -> None:
    assert schedule.num_steps == simulation.num_steps
    assert schedule.used_slot_steps == simulation.used
    assert schedule.idle_slot_steps == simulation.idle
    assert schedule.idle_slot_share == simulation.idle / (simulation.idle + simulation.used)
    assert list(schedule.slots) == simulation.slots
    assert list(schedule.first_steps) == simulation.first_steps
    assert list(schedule.end_steps) == simulation.end_steps
    assert set(evaluate(schedule.arithmetic.replace(" used", "").split(" idle")[0])) == {simulation.idle}


@given(output_lens=LENGTHS, num_slots=st.integers(1, 9))
def test_against_a_simulation_step_by_step(output_lens: list[int], num_slots: int) -> None:
    comparison = compare_batching(output_lens, num_slots)
    assert_same(comparison.static, Simulation("static", output_lens, num_slots))
    assert_same(comparison.continuous, Simulation("continuous", output_lens, num_slots))
    assert comparison.least_steps <= comparison.continuous.num_steps <= comparison.static.num_steps
    assert comparison.throughput_ratio == comparison.static.num_steps / comparison.continuous.num_steps


@given(
    requests=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 30)), min_size=1, max_size=15),
    num_slots=st.integers(1, 6),
    chunk=st.none() | st.integers(1, 10),
)
def test_prompts_in_pieces_against_a_simulation(
    requests: list[tuple[int, int]], num_slots: int, chunk: int | None
) -> None:
    outputs, prompts = [output for output, _ in requests], [prompt for _, prompt in requests]
    comparison = compare_batching(outputs, num_slots, prompt_lens=prompts, prefill_chunk=chunk)
    assert_same(comparison.static, Simulation("static", outputs, num_slots, prompts, chunk))
    assert_same(comparison.continuous, Simulation("continuous", outputs, num_slots, prompts, chunk))


def test_two_slots_by_hand() -> None:
    """Static: 8 + 8 steps, slots idle for 6 + 6. Continuous: slot 0 runs 8 steps, slot 1 four requests: 2 + 2 + 8."""
    comparison = compare_batching([8, 2, 2, 8], 2)
    static, continuous = comparison.static, comparison.continuous
    assert (static.num_steps, static.slot_steps, static.used_slot_steps, static.idle_slot_steps) == (16, 32, 20, 12)
    assert static.idle_slot_share == 0.375
    assert static.first_steps == (0, 0, 8, 8)
    assert (continuous.num_steps, continuous.idle_slot_steps) == (12, 4)
    assert continuous.slots == (0, 1, 1, 1)
    assert continuous.first_steps == (0, 0, 2, 4)
    assert continuous.end_steps == (8, 2, 4, 12)
    assert comparison.least_steps == 10
    assert comparison.throughput_ratio == 16 / 12
    assert comparison.arithmetic == "16 / 12 steps = ×1.33"
    assert static.arithmetic == "16 steps × 2 slots − 20 used = 12 idle (37.5%)"


def test_equal_lengths_gain_nothing_and_one_long_one_gains_most() -> None:
    assert compare_batching([5] * 12, 4).throughput_ratio == 1
    # Each static batch waits for its one long request. Continuously the last of them begins after 6 steps, the long ones before
    # it having a slot each and the short ones following one another in what is left.
    comparison = compare_batching([100, 1, 1, 1] * 4, 4)
    assert (comparison.static.num_steps, comparison.continuous.num_steps) == (400, 106)


def test_more_slots_than_requests() -> None:
    comparison = compare_batching([3, 1], 4)
    assert comparison.static == comparison.continuous
    assert (comparison.static.num_steps, comparison.static.idle_slot_steps) == (3, 8)


def test_a_million_requests_are_no_matter() -> None:
    """Tokens run into the 10^12: whatever steps one by one would not come back."""
    lengths = [10**6 + index for index in range(10**5)]
    comparison = compare_batching(lengths, 64)
    assert comparison.continuous.used_slot_steps == sum(lengths)
    assert comparison.static.num_steps == sum(lengths[63::64]) + lengths[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_lens": []}, "output_lens names no request"),
        ({"output_lens": [1, 0]}, "output_lens holds 0"),
        ({"num_slots": 0}, "num_slots 0 is below 1"),
        ({"prompt_lens": [1]}, "prompt_lens has 1 entries and output_lens 2"),
        ({"prompt_lens": [1, 0]}, "prompt_lens holds 0"),
        ({"prefill_chunk": 4}, "prefill_chunk 4 is set without prompt_lens"),
        ({"prompt_lens": [1, 1], "prefill_chunk": 0}, "prefill_chunk 0 is below 1"),
    ],
)
def test_values_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_batching(**({"output_lens": [1, 2], "num_slots": 2} | arguments))
