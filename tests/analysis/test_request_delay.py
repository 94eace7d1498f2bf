"""What a request waited for, against a walk over the scheduler's own states in small intervals of time."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from backend.analysis.delay_words import gap_sentences, ttft_sentences
from backend.analysis.request_delay import Delay, Part, company, delay, longest_gap
from backend.metrics.request_timeline import RequestTimeline, RunTimelines
from tests.metrics.traffic import Traffic, traffic


@pytest.fixture(scope="module", params=[{}, {"ahead": 1, "policy": "prefill_first"}, {"batching": "static"}], ids=str)
def made(request: pytest.FixtureRequest) -> Traffic:
    return traffic(**request.param)


def line(made: Traffic, timelines: RunTimelines, key: str) -> RequestTimeline:
    found = timelines.timeline(key, made.arrivals[key], made.finishes[key])
    assert found is not None
    return found


def tokens(made: Traffic, step: int, key: str) -> dict[str, int]:
    """(own, others' prompt, others' decode) tokens of a step."""
    sums: dict[str, int] = {"own": 0, "prompt": 0, "decode": 0}
    for entry in made.steps[step].entries:
        kind = "own" if entry.request_id == key else "decode" if entry.kind == "decode" else "prompt"
        sums[kind] += entry.num_scheduled_tokens
    return sums


def naive(made: Traffic, key: str, start: float, end: float) -> dict[str, list[float]]:
    """Cause -> seconds, steps, own, others' prompt and others' decode tokens, cut at every start of a step."""
    starts = {begin: step for step, begin, _ in made.times}
    bounds = sorted({start, end, *(begin for begin in starts if start < begin < end)})
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    for begin, stop in pairwise(bounds):
        state = made.state_at(key, begin)
        assert state is not None
        step = max((number for time, number in starts.items() if time <= begin), default=None)
        if state == "decode" and step is not None and tokens(made, step, key)["prompt"]:
            state = "decode_beside_prompts"
        found[state][0] += stop - begin
        if begin in starts and step is not None:
            sums = tokens(made, step, key)
            found[state][1] += 1
            found[state][2] += sums["own"]
            found[state][3] += sums["prompt"]
            found[state][4] += sums["decode"]
    return found


def test_parts_are_those_of_a_walk_through_time(made: Traffic) -> None:
    timelines, rng = made.timelines(), random.Random(4)
    causes: Counter[str] = Counter()
    for key in made.arrivals:
        whole = (made.arrivals[key], made.finishes[key])
        stretches = [whole, (whole[0], made.emissions[key][0]), tuple(sorted(rng.uniform(*whole) for _ in range(2)))]
        for start, end in stretches:
            found = delay(timelines, line(made, timelines, key), start, end)
            expected = naive(made, key, start, end)
            assert {part.cause for part in found.parts} == expected.keys()
            for part in found.parts:
                counts = [part.num_steps, part.own_tokens, part.others_prompt_tokens, part.others_decode_tokens]
                assert [part.seconds, *counts] == pytest.approx(expected[part.cause], abs=1e-9), (key, part)
                causes[part.cause] += 1
            assert sum(part.seconds for part in found.parts) == pytest.approx(found.seconds)
            assert found.parts == tuple(sorted(found.parts, key=lambda part: -part.seconds))
    assert {"queued", "prefill", "decode"} <= causes.keys()


def test_outside_its_life_nothing_is_counted(made: Traffic) -> None:
    timelines = made.timelines()
    key = "7-3"
    found = delay(timelines, line(made, timelines, key), -100.0, 1e6)
    assert (found.start, found.end) == (made.arrivals[key], made.finishes[key])


def test_company_counts_every_entry_of_shared_steps(made: Traffic) -> None:
    timelines = made.timelines()
    for key in list(made.arrivals)[::4]:
        found = line(made, timelines, key)
        mine = {
            step.step
            for step in made.steps
            if any(entry.request_id == key for entry in step.entries) and made.times[step.step][1] < made.finishes[key]
        }
        expected: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for step in mine:
            for entry in made.steps[step].entries:
                if entry.request_id != key:
                    row = expected[entry.request_id]
                    row[0] += 1
                    row[2 if entry.kind == "decode" else 1] += entry.num_scheduled_tokens
        others = company(timelines, found)
        counted = {other.request_id: [other.num_steps, other.prompt_tokens, other.decode_tokens] for other in others}
        assert counted == expected
        assert [other.prompt_tokens for other in others] == sorted((row[1] for row in expected.values()), reverse=True)


def test_longest_gap() -> None:
    assert longest_gap([1.0, 2.0, 5.0, 5.5, 8.5]) == (2, 2.0, 5.0)
    assert longest_gap([1.0]) is None
    assert longest_gap([]) is None


def seconds(value: float) -> str:
    return f"{value:g} s"


def test_words_of_a_wait_and_of_work() -> None:
    queued = Part("queued", 6.0, 3, 0, 120, 7)
    prefill = Part("prefill", 2.0, 2, 64, 0, 1)
    assert ttft_sentences(Delay(10.0, 18.0, (queued, prefill)), seconds) == [
        "The first token came 8 s after the arrival (TTFT).",
        "Most of it, 6 s (75 %), went by in the queue; the 3 steps that began meanwhile ran 120 prompt tokens and "
        "7 decode tokens.",
        "The rest: 2 s on its prompt.",
    ]
    assert ttft_sentences(Delay(0.0, 2.0, (prefill,)), seconds)[1:] == [
        "All of it went by on computing its prompt: 2 steps ran 64 of its tokens beside 1 decode token of other requests."
    ]
    alone = Part("prefill", 2.0, 1, 64, 0, 0)
    assert ttft_sentences(Delay(0.0, 2.0, (alone,)), seconds)[1].endswith("1 step ran 64 of its tokens, alone.")


def test_what_is_next_to_nothing_is_not_named() -> None:
    parts = (Part("decode", 0.999, 1, 1, 0, 3), Part("prefill", 0.001))
    sentences = gap_sentences(Delay(0.0, 1.0, parts), 2, 0.5, seconds)
    assert sentences[1] == (
        "All of it went by on decode steps without anybody's prompt: 1 step ran 1 of its tokens beside 3 decode tokens of "
        "other requests."
    )


def test_words_of_a_gap() -> None:
    parts = (Part("decode_beside_prompts", 2.0, 1, 1, 512, 3), Part("preempted", 1.5), Part("decode", 1.0, 1, 1, 0, 3))
    sentences = gap_sentences(Delay(0.0, 4.5, parts), 17, 0.5, seconds)
    assert sentences == [
        "The longest gap between tokens, 4.5 s, ×9 of its median gap, ended with delivery 17.",
        "The largest part of it, 2 s (44 %), went by on decode steps that also ran prompts of other requests: 1 step ran "
        "1 of its tokens beside 512 prompt tokens and 3 decode tokens of other requests.",
        "The rest: 1.5 s preempted, 1 s on decode steps.",
    ]
