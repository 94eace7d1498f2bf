"""The Scheduler page's charts: few bars of many spans and steps, with nothing lost, and specs that stay as they are."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from app.components import palette, scheduler_charts
from app.components.scheduler_controls import clamped
from app.components.scheduler_rows import bars_of, gantt_rows, step_rows, waterfall_rows
from backend.metrics.ledger_format import STEP_KINDS
from backend.metrics.request_timeline import SPAN_KINDS, RequestTimeline, Span
from tests.metrics.traffic import traffic


def line(rng: random.Random, name: str, num_spans: int) -> RequestTimeline:
    cursor, spans = rng.uniform(0, 5), []
    for place in range(num_spans):
        end = cursor + rng.expovariate(num_spans)
        spans.append(Span(rng.choice(SPAN_KINDS), cursor, end, place, place + 1, place % 3))
        cursor = end
    return RequestTimeline(name, spans[0].start, cursor, tuple(spans), 0)


def test_many_spans_are_few_bars_that_still_tile() -> None:
    rng = random.Random(0)
    lines = [line(rng, f"1-{index}", 300) for index in range(80)]
    window = (0.0, 8.0)
    bars = bars_of(lines, window, 800)
    assert 240 < sum(map(len, bars)) <= 800
    for found, whole in zip(bars, lines, strict=True):
        assert (found[0].start, found[-1].end) == (whole.start, min(whole.end, window[1]))
        assert all(earlier.end == later.start for earlier, later in pairwise(found))
        assert sum(bar.num_spans for bar in found) == sum(span.start < window[1] for span in whole.spans)
    assert sum(map(len, bars_of(lines, window, 100_000))) > 8000, "as fine as there is room for"
    rows = gantt_rows(lines, {it.request_id: it.request_id for it in lines}, window)
    assert len(rows) <= 2002


def test_a_bar_has_the_kind_of_most_of_its_time_and_long_spans_stay_alone() -> None:
    kinds = [("queued", 5.0), ("decode", 0.02), ("stalled", 0.03), ("decode", 0.02), ("prefill", 4.0)]
    cursor, spans = 0.0, []
    for kind, seconds in kinds:
        spans.append(Span(kind, cursor, cursor + seconds, 0, 1, 1))  # type: ignore[arg-type]
        cursor += seconds
    (bars,) = bars_of([RequestTimeline("a", 0.0, cursor, tuple(spans), 0)], (0.0, cursor), 3)
    assert [(bar.kind, bar.num_spans) for bar in bars] == [("queued", 1), ("decode", 3), ("prefill", 1)]


def test_every_span_kind_has_a_colour_of_its_own() -> None:
    assert set(palette.SPANS) == set(SPAN_KINDS)
    assert len(set(palette.SPANS.values())) == len(SPAN_KINDS)
    assert set(STEP_KINDS) <= set(SPAN_KINDS)


def test_a_request_in_its_steps_is_told_from_the_others() -> None:
    made = traffic()
    timelines = made.timelines()
    key = "7-5"
    own = {s.step: (e.kind, e.num_scheduled_tokens) for s in made.steps for e in s.entries if e.request_id == key}
    for max_buckets in (10_000, 20):
        buckets = timelines.composition.buckets(timelines.composition.steps, max_buckets)
        rows = step_rows(buckets, (0.0, made.times[-1][2]), own=own)
        sums: Counter[str] = Counter()
        sizes = {bucket.start: bucket.end_step - bucket.first_step for bucket in buckets}
        for row in rows.query("part == 'tokens'").to_dict(orient="records"):
            sums[row["kind"]] += row["tokens"] * sizes[row["x"]]
        expected = Counter({"its own": sum(tokens for _, tokens in own.values())})
        for step in made.steps:
            for entry in step.entries:
                if entry.request_id != key:
                    expected[entry.kind] += entry.num_scheduled_tokens
        assert sums == pytest.approx(expected)


def test_specs_are_the_same_for_other_data() -> None:
    made = traffic()
    timelines = made.timelines()
    found = timelines.timeline("7-5", made.arrivals["7-5"], made.finishes["7-5"])
    assert found is not None
    rows = waterfall_rows(found, 30, 50.0)
    assert rows.query("part == 'bar'")["row"].nunique() == len(rows) - 2
    assert rows.query("part == 'frame'")["x"].tolist() == [0.0, 50.0]
    buckets = timelines.composition.buckets(range(3), 10)
    for wide in (False, True):
        first = scheduler_charts.step_tokens(step_rows(buckets, (0.0, 9.0)), "a", "x", wide=wide)
        second = scheduler_charts.step_tokens(step_rows([], (0.0, 99.0)), "a", "x", wide=wide)
        assert first.spec == second.spec
        assert first.spec is not second.spec


def test_a_window_stays_within_what_there_is() -> None:
    rng = random.Random(0)
    for _ in range(100):
        window = tuple(sorted(rng.uniform(1, 9) for _ in range(2)))
        assert clamped((window[0], window[1] + 0.01), (0.0, 10.0)) == (window[0], window[1] + 0.01)
    assert clamped((-3.0, 1.0), (0.0, 10.0)) == (0.0, 4.0)
    assert clamped((8.0, 14.0), (0.0, 10.0)) == (4.0, 10.0)
    assert clamped((-5.0, 50.0), (0.0, 10.0)) == (0.0, 10.0)
