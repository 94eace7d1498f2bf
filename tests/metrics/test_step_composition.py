"""Columns and bars of steps against sums over the ledger's entries."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from backend.metrics.ledger_format import STEP_KINDS
from backend.metrics.step_composition import StepComposition
from tests.metrics.traffic import Traffic, traffic


@pytest.fixture(scope="module")
def made() -> Traffic:
    return traffic()


@pytest.fixture(scope="module")
def composition(made: Traffic) -> StepComposition:
    return made.timelines().composition


def naive(made: Traffic, steps: range) -> dict[str, int]:
    sums: dict[str, int] = dict.fromkeys(STEP_KINDS, 0)
    for step in made.steps[steps.start : steps.stop]:
        for entry in step.entries:
            sums[entry.kind] += entry.num_scheduled_tokens
    return sums


def test_columns(made: Traffic, composition: StepComposition) -> None:
    assert composition.starts.tolist() == [start for _, start, _ in made.times]
    assert composition.ends.tolist() == [end for _, _, end in made.times]
    assert composition.num_requests.tolist() == [len(step.entries) for step in made.steps]
    for step in composition.steps:
        assert dict(zip(STEP_KINDS, composition.num_tokens[step].tolist(), strict=True)) == naive(
            made, range(step, step + 1)
        )
    rng = random.Random(0)
    for _ in range(20):
        first, last = sorted(rng.choices(composition.steps, k=2))
        assert composition.tokens_in(range(first, last)) == naive(made, range(first, last))


def test_steps_of_a_time(made: Traffic, composition: StepComposition) -> None:
    rng = random.Random(0)
    end = made.times[-1][2]
    for _ in range(200):
        begin, stop = sorted(rng.uniform(-3, end + 3) for _ in range(2))
        assert list(composition.steps_begun(begin, stop)) == [
            step for step, start, _ in made.times if begin <= start < stop
        ]
        lasts = [start for _, start, _ in made.times[1:]] + [end]
        under_way = [step for step, start, _ in made.times if start < stop and lasts[step] > begin]
        assert list(composition.steps_under_way(begin, stop)) == under_way
    assert not StepComposition().steps_under_way(0, 1)
    assert not StepComposition().steps_begun(0, 1)


@pytest.mark.parametrize("max_buckets", [1, 7, 50, 10_000])
def test_bars_hold_all_tokens(made: Traffic, composition: StepComposition, max_buckets: int) -> None:
    for steps in (composition.steps, range(13, 61), range(-5, 10_000), range(5, 5)):
        buckets = composition.buckets(steps, max_buckets)
        there = [step for step in steps if step in composition.steps]
        assert len(buckets) <= max_buckets
        assert [step for bucket in buckets for step in range(bucket.first_step, bucket.end_step)] == there
        for bucket in buckets:
            inside = range(bucket.first_step, bucket.end_step)
            sums = Counter(naive(made, inside))
            assert bucket.num_tokens == pytest.approx([sums[kind] / len(inside) for kind in STEP_KINDS])
            assert bucket.longest_s == pytest.approx(
                max(end - start for _, start, end in made.times[inside.start : inside.stop])
            )
            assert (bucket.start, bucket.end) == (made.times[inside[0]][1], made.times[inside[-1]][2])


def test_bars_stay_where_they_are_while_a_run_grows(made: Traffic) -> None:
    growing, before = StepComposition(), []
    for step, (_, start, end) in zip(made.steps, made.times, strict=True):
        growing.append(step, start, end)
        bars = growing.buckets(growing.steps, 16)
        same = [bar[:2] for bar in bars[:-1]] == [bar[:2] for bar in before[: len(bars) - 1]]
        assert same or len(bars) <= 9, "they change when they have doubled"
        before = bars
