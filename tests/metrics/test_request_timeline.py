"""Timelines against what the scheduler itself thought of each request in each step."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from backend.core.block_events import BlockEvent
from backend.metrics.ledger_format import LedgerEntry, LedgerStep
from backend.metrics.request_timeline import RequestTimeline, RunTimelines
from tests.metrics.traffic import Traffic, traffic

SETTINGS: list[dict] = [
    {},
    {"ahead": 1},
    {"batching": "static"},
    {"policy": "prefill_first", "ahead": 1},
    {"policy": "priority"},
    {"layout": "contiguous", "num_blocks": 60},
    {"layout": "none", "max_prompt_len": 20},
    {"budget": 4},
]


def names(settings: dict) -> str:
    return "-".join(f"{key}={value}" for key, value in settings.items()) or "default"


@pytest.fixture(scope="module", params=SETTINGS, ids=names)
def made(request: pytest.FixtureRequest) -> Traffic:
    return traffic(**request.param)


def timeline(made: Traffic, timelines: RunTimelines, key: str) -> RequestTimeline:
    found = timelines.timeline(key, made.arrivals[key], made.finishes[key])
    assert found is not None
    return found


def test_spans_tile_a_request_from_arrival_to_finish(made: Traffic) -> None:
    timelines = made.timelines()
    for key in made.arrivals:
        spans = timeline(made, timelines, key).spans
        assert (spans[0].start, spans[-1].end) == (made.arrivals[key], made.finishes[key])
        assert all(earlier.end == later.start for earlier, later in pairwise(spans))
        assert all(span.end > span.start for span in spans)


def test_at_any_moment_a_request_does_what_the_scheduler_said(made: Traffic) -> None:
    timelines, rng = made.timelines(), random.Random(1)
    seen: Counter[str] = Counter()
    for key in made.arrivals:
        spans = timeline(made, timelines, key).spans
        moments = [rng.uniform(made.arrivals[key], made.finishes[key]) for _ in range(30)]
        for moment in [*moments, *(start for _, start, _ in made.times)]:
            state = next((span.kind for span in spans if span.start <= moment < span.end), None)
            assert state == made.state_at(key, moment), (key, moment)
            seen[str(state)] += 1
    assert {"queued", "prefill"} <= seen.keys()


def test_what_the_traffic_holds() -> None:
    """The moments above are worth something only where every kind occurs."""
    timelines = {index: traffic(**settings) for index, settings in enumerate(SETTINGS)}
    kinds = {
        index: {span.kind for key in made.arrivals for span in timeline(made, made.timelines(), key).spans}
        for index, made in timelines.items()
    }
    assert {"queued", "prefill", "decode", "recompute", "preempted"} <= kinds[0]
    assert "stalled" in kinds[3], "prefill_first makes decodes wait"
    assert "stalled" in kinds[7], "with a budget below the batch, decodes take turns"
    assert "preempted" not in kinds[6]


def test_tokens_and_steps_of_spans_are_those_of_the_ledger(made: Traffic) -> None:
    timelines = made.timelines()
    for key in made.arrivals:
        found = timeline(made, timelines, key)
        ran: Counter[tuple[str, int]] = Counter()
        for step in made.steps:
            for entry in step.entries:
                if entry.request_id == key:
                    ran[entry.kind, step.step] += entry.num_scheduled_tokens
        in_life = {place: count for place, count in ran.items() if made.times[place[1]][1] < made.finishes[key]}
        assert found.num_dropped_tokens == sum(ran.values()) - sum(in_life.values())
        running = [span for span in found.spans if span.is_running]
        for span in running:
            steps = range(span.first_step, span.end_step)
            assert span.num_tokens == sum(in_life.pop((span.kind, step)) for step in steps)
        assert not in_life
        for span in found.spans:
            if not span.is_running:
                began = [step for step, start, _ in made.times if span.start <= start < span.end]
                assert list(range(span.first_step, span.end_step)) == began
        prefills = [span for span in running if span.kind == "prefill"]
        if not any(span.kind == "recompute" for span in running):  # whose chunks may go on with the prompt
            assert sum(span.num_tokens for span in prefills) == made.prompt_lens[key]
        assert all(span.num_steps == 1 for span in prefills), "each chunk is a span"


def test_a_token_of_an_ended_request_is_dropped() -> None:
    """A step is in flight when the request ends by its last token's stop string, so to say."""
    made = traffic(ahead=1, num_requests=6)
    key = max(made.arrivals, key=lambda key: len(made.emissions[key]))
    early = made.emissions[key][3] + 1e-6
    timelines = made.timelines()
    whole = timelines.timeline(key, made.arrivals[key], made.finishes[key])
    cut = timelines.timeline(key, made.arrivals[key], early)
    assert whole is not None
    assert cut is not None
    tokens = [sum(span.num_tokens for span in line.spans) for line in (whole, cut)]
    assert cut.num_dropped_tokens == tokens[0] - tokens[1] > 0
    assert cut.end == early


def test_neighbouring_decode_steps_are_one_span() -> None:
    made = traffic(num_requests=1, max_prompt_len=5)
    (key,) = made.arrivals
    spans = timeline(made, made.timelines(), key).spans
    assert [span.kind for span in spans if span.is_running] == ["prefill", "decode"]
    assert spans[-1].num_steps == len(made.steps) - 1 == spans[-1].num_tokens


def test_growing_gives_what_reading_at_once_gives() -> None:
    made = traffic()
    at_once, growing = made.timelines(), RunTimelines()
    for end in range(0, len(made.steps) + 7, 7):  # times run ahead of the ledger, and behind it
        growing.extend(made.steps[max(0, end - 9) : end], made.times[: end + 3])
        growing.extend(made.steps[end : end + 2], made.times[: end + 1])
    assert growing.composition.steps == at_once.composition.steps == range(len(made.steps))
    for key in made.arrivals:
        assert timeline(made, growing, key) == timeline(made, at_once, key)


def test_a_run_that_goes_on_shows_what_there_is() -> None:
    made, timelines = traffic(), RunTimelines()
    half = len(made.steps) // 2
    timelines.extend(made.steps[:half], made.times)
    now = made.times[half - 1][2]
    for key in timelines.request_ids:
        found = timelines.timeline(key, None, None)
        assert found is not None
        (first,) = [step for step in range(half) if made.states[step].get(key) == "prefill"][:1]
        assert found.start == made.times[first][1]
        last = _last(made, key)
        # One that has ended gave back its blocks in the step after its last.
        is_known_to_have_ended = last + 1 < half
        assert found.end == (made.times[last + 1][1] if is_known_to_have_ended else now)
        for span in found.spans:
            middle = (span.start + span.end) / 2
            if middle < made.finishes[key]:
                assert span.kind == made.state_at(key, max(middle, made.arrivals[key]))
    assert timelines.timeline("7-39", None, None) is None
    waiting = timelines.timeline("7-39", 1.0, 5.0)
    assert waiting is not None
    assert [(span.kind, span.start, span.end) for span in waiting.spans] == [("queued", 1.0, 5.0)]


def _last(made: Traffic, key: str) -> int:
    return max(step.step for step in made.steps if any(entry.request_id == key for entry in step.entries))


def test_a_ledger_without_events_knows_preemptions_by_what_is_computed_again() -> None:
    rows = [("prefill", 8), ("decode", 1), None, None, ("recompute", 9), None, ("recompute", 1), ("decode", 1)]
    steps = [
        LedgerStep(step, (LedgerEntry("a", row[1], row[0]),) if row else ())  # type: ignore[arg-type]
        for step, row in enumerate(rows)
    ]
    times = [(step, float(step), step + 0.9) for step in range(len(rows))]
    for events, gap in (((), "preempted"), ((BlockEvent("cache", None, 0, [1]),), "stalled")):
        timelines = RunTimelines()
        timelines.extend([steps[0]._replace(events=events), *steps[1:]], times)
        found = timelines.timeline("a", 0.0, 7.8)
        assert found is not None
        kinds = [(span.kind, span.start) for span in found.spans]
        assert kinds == [
            ("prefill", 0.0), ("decode", 1.0), (gap, 2.0), ("recompute", 4.0), ("stalled", 5.0), ("recompute", 6.0),
            ("decode", 7.0),
        ]  # fmt: skip


def test_a_request_that_is_swapped_out_waits_until_it_runs_on() -> None:
    out, back = BlockEvent("swap_out", "a", 0, [1, 2]), BlockEvent("swap_in", "a", 0, [3, 4])
    rows = [(("prefill", 8), ()), (("decode", 1), ()), (None, (out,)), (None, ()), (("decode", 1), (back,))]
    steps = [
        LedgerStep(step, (LedgerEntry("a", row[1], row[0]),) if row else (), events)  # type: ignore[arg-type]
        for step, (row, events) in enumerate(rows)
    ]
    timelines = RunTimelines()
    timelines.extend(steps, [(step, float(step), step + 0.9) for step in range(5)])
    found = timelines.timeline("a", 0.0, 4.8)
    assert found is not None
    kinds = [(span.kind, span.start, span.end) for span in found.spans]
    assert kinds == [("prefill", 0.0, 1.0), ("decode", 1.0, 2.0), ("swapped", 2.0, 4.0), ("decode", 4.0, 4.8)]
    assert found.num_preemptions == 1
