"""Slots of steps against a count by hand, and against the closed form of static and continuous batching."""

from __future__ import annotations

import pytest

from backend.analysis.batching import compare_batching
from backend.analysis.slot_use import slot_use
from backend.metrics.request_timeline import RequestTimeline, RunTimelines
from backend.metrics.step_composition import StepComposition
from tests.metrics.traffic import Traffic, traffic

SLOTS = 6


def lines(made: Traffic, timelines: RunTimelines) -> list[RequestTimeline]:
    found = [timelines.timeline(key, made.arrivals[key], made.finishes[key]) for key in made.arrivals]
    return [line for line in found if line is not None]


@pytest.mark.parametrize("settings", [{}, {"batching": "static"}, {"ahead": 1}])
def test_against_a_count_step_by_step(settings: dict) -> None:
    made = traffic(**settings)
    timelines = made.timelines()
    for steps in (timelines.composition.steps, range(10, 40)):
        used = waiting = 0
        for step in steps:
            start = made.times[step][1]
            running = len(made.steps[step].entries)
            used += running
            idle_for = [key for key in made.arrivals if made.state_at(key, start) in ("queued", "preempted")]
            waiting += min(SLOTS - running, len(idle_for))
        use = slot_use(timelines.composition, lines(made, timelines), SLOTS, steps)
        assert (use.used_slot_steps, use.idle_while_waiting_slot_steps) == (used, waiting)
        assert use.idle_share == 1 - used / (SLOTS * len(steps))
        assert use.idle_while_waiting_share == waiting / (SLOTS * len(steps))


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_all_at_once_it_is_the_closed_form(batching: str) -> None:
    """With a budget and a pool that hold everything, a request runs for one step per output token."""
    made = traffic(batching=batching, all_at_once=True, num_blocks=400, budget=1000, max_prompt_len=6)
    timelines = made.timelines()
    outputs = [len(made.emissions[key]) for key in made.arrivals]
    expected = getattr(compare_batching(outputs, SLOTS), batching)
    use = slot_use(timelines.composition, lines(made, timelines), SLOTS, timelines.composition.steps)
    assert (use.num_steps, use.used_slot_steps) == (expected.num_steps, expected.used_slot_steps)
    assert use.idle_share == pytest.approx(expected.idle_slot_share)
    waits_while_idle = use.idle_while_waiting_share
    assert waits_while_idle is not None
    assert (waits_while_idle > 0.1) == (batching == "static"), "a continuous batch fills a free slot at once"


def test_no_step_has_no_share() -> None:
    use = slot_use(StepComposition(), [], 4, range(0))
    assert (use.idle_share, use.idle_while_waiting_share) == (None, None)
