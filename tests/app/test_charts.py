"""Chart specs and the numbers in them. What they look like is for the eye."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.components import live_charts, palette, run_charts
from app.components.bars import Share, share_bar_html
from app.components.chart_rows import MAX_ECDF_POINTS, Point, axis_end, ecdf_points, line_rows
from app.components.charts import ecdf, lines
from backend.metrics.series import MAX_POINTS, LivePoint, LiveSeries
from backend.metrics.stats import StepStats

finite = st.floats(min_value=1e-6, max_value=1e9)


def split(chart: alt.LayerChart) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A chart's spec without its data, and the data."""
    spec = chart.to_dict()
    (rows,) = spec.pop("datasets").values()
    spec.pop("data", None)
    return spec, rows


def series(seconds: float) -> list[LivePoint]:
    times = np.arange(0.25, seconds + 0.01, 0.25)
    return [LivePoint(float(time), 100.0, 7.0 * time, 3, 1, 0.5) for time in times]


def step(end_time: float, tokens: int, num_steps: int = 1) -> dict[str, Any]:
    return {
        "end_time": end_time,
        "duration_ms": 100.0,
        "num_steps": num_steps,
        "num_output_tokens": tokens,
        "num_prefill_tokens": 2 * tokens,
        "num_decode_tokens": tokens,
        "num_running": 2,
        "num_waiting": 1,
        "kv_cache_usage": 0.25,
    }


LIVE = [live_charts.throughput, live_charts.requests, live_charts.kv_usage]


def live(picture: Any, points: Sequence[LivePoint]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A picture's data as the page reads it, and its spec."""
    data, spec = picture(live_charts.columns_of(points))
    return data.to_pandas(), spec


@pytest.mark.parametrize("picture", LIVE)
def test_a_live_chart_changes_its_data_only(picture: Any) -> None:
    (empty, first), (early, second), (late, third) = (live(picture, series(seconds)) for seconds in (0, 3, 300))
    assert first == second == third
    assert first["height"] == 250
    assert "data" not in first
    assert list(empty.columns) == list(late.columns)
    assert len(late) > len(early)


@pytest.mark.parametrize("picture", LIVE)
def test_a_live_chart_is_the_same_whoever_draws_it(picture: Any) -> None:
    _, drawn = live(picture, series(3))
    drawn["layer"].clear()  # a renderer may write into what it is given
    assert live(picture, series(3))[1]["layer"]


@pytest.mark.parametrize("number", [0, 1, 2, 8, 9, 40])
@pytest.mark.parametrize("interval", [0.25, 0.75, 4.0])
def test_live_charts_draw_the_rows_of_a_line_chart(number: int, interval: float) -> None:
    """Point by point, with the windows' means written out; of every size of the window, one point included."""
    rng = np.random.default_rng(number)
    points = [
        LivePoint((i + 1) * interval, *rng.uniform(0, 900, 2).tolist(), *rng.integers(0, 9, 2).tolist(), rng.uniform())
        for i in range(number)
    ]

    def window_mean(place: int, name: str) -> float:
        end = points[place].time_s
        inside = [p for p in points[: place + 1] if p.time_s > end - 2.0 or p is points[place]]
        return statistics.fmean(getattr(p, name) for p in inside)

    charts: dict[Any, dict[str, list[float]]] = {
        live_charts.throughput: {
            "output": [window_mean(place, "output_tok_s") for place in range(number)],
            "input": [window_mean(place, "input_tok_s") for place in range(number)],
        },
        live_charts.requests: {"running": [p.running for p in points], "waiting": [p.waiting for p in points]},
        live_charts.kv_usage: {"in use": [p.kv_cache_usage for p in points]},
    }
    for picture, lines_of in charts.items():
        data, _ = live(picture, points)
        expected = line_rows(
            [Point(line, p.time_s, y) for line, ys in lines_of.items() for p, y in zip(points, ys, strict=True)],
            dict.fromkeys(lines_of, "#000000"),
            x_end=axis_end(max(10.0, 1.15 * interval * number)),
            y_end=1.0 if picture is live_charts.kv_usage else None,
        )
        texts = ["kind", "series", "label"]
        assert data[texts].fillna("nothing").equals(expected[texts].astype("str").fillna("nothing"))
        np.testing.assert_allclose(data[["x", "y"]], expected[["x", "y"]].astype(float), rtol=1e-9, atol=1e-9)


def test_a_live_chart_sends_no_more_rows_however_long_a_run_is() -> None:
    """Ten hours of steps every 20 ms, a day, a month: two lines of a bounded series, a frame and two names."""
    for hours in (0.1, 10, 24, 720):
        points = LiveSeries()
        for step_number in range(2000):
            points.add(StepStats(0, 0, 20, 1, 18, 1, 2, 0, 2, 2, 2, 3, 0, 6, 1, 3), hours * 3600 * step_number / 2000)
        for picture in LIVE:
            assert len(live(picture, points.points())[0]) <= 2 * MAX_POINTS + 4


def test_live_axes_grow_in_few_jumps() -> None:
    ends = {live(live_charts.throughput, series(seconds))[0]["x"].max() for seconds in range(1, 100)}
    assert len(ends) < 12


def test_live_throughput_ends_at_the_mean_of_the_last_two_seconds() -> None:
    data, _ = live(live_charts.throughput, series(10))
    last = data[(data["kind"] == "line") & (data["series"] == "input")]["y"].iloc[-1]
    assert last == pytest.approx(np.mean([7.0 * time for time in np.arange(8.25, 10.01, 0.25)]))


def test_prefill_and_decode_keep_their_colours() -> None:
    stored, _ = split(run_charts.throughput([step(0.1, 3), step(0.2, 3)]))
    for spec in (live(live_charts.throughput, series(3))[1], stored):
        scale = spec["layer"][1]["encoding"]["color"]["scale"]
        assert dict(zip(scale["domain"], scale["range"], strict=True)) == {"output": "#E69F00", "input": "#0072B2"}


def test_axes_have_units_and_legends_give_way_to_labels() -> None:
    colours = {"a": "#0072B2", "b": "#E69F00"}
    chart = lines([Point("a", 1, 2), Point("b", 1, 2)], colours, title="T", x_title="s", y_title="tok/s")
    spec, rows = split(chart)
    encoding = spec["layer"][1]["encoding"]
    assert (encoding["x"]["title"], encoding["y"]["title"]) == ("s", "tok/s")
    assert encoding["color"]["legend"] is None
    heights = sorted(row["y"] for row in rows if row["kind"] == "label")
    assert heights[1] - heights[0] >= 0.1 * axis_end(2) - 1e-9
    many = dict.fromkeys("abcd", "#000000")
    spec, rows = split(lines([Point(name, 1, 1) for name in many], many, title="T", x_title="s", y_title="s"))
    assert spec["layer"][1]["encoding"]["color"]["legend"]["orient"] == "top-right"
    assert not [row for row in rows if row["kind"] == "label"]


@given(st.lists(finite, max_size=50))
def test_ecdf_is_the_share_at_or_below(values: list[float]) -> None:
    for x, share in ecdf_points(values)[1:]:
        below = sum(value <= x for value in values) / len(values)
        before = sum(value < x for value in values) / len(values)
        assert before < share <= below + 1e-12


@given(st.integers(2, 5000))
def test_long_samples_are_thinned_and_keep_their_ends(n: int) -> None:
    points = ecdf_points(list(range(n)))
    assert len(points) <= MAX_ECDF_POINTS + 1
    assert (points[0], points[-1]) == ((0, 0.0), (n - 1, 1.0))


def test_an_empty_sample_draws_nothing_and_keeps_its_colour() -> None:
    spec, rows = split(ecdf({"a": [1.0, 2.0], "b": []}, {"a": "#000000", "b": "#111111"}, title="T", unit="ms"))
    assert {row["series"] for row in rows if row["kind"] == "line"} == {"a"}
    assert spec["layer"][1]["encoding"]["color"]["scale"]["domain"] == ["a", "b"]


@given(finite)
def test_an_axis_ends_just_above_its_data(value: float) -> None:
    end = axis_end(value)
    assert value <= end * (1 + 1e-9) <= 2 * value * (1 + 1e-6)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_an_axis_without_data_has_an_end(value: float) -> None:
    assert axis_end(value) == 1.0


@given(st.lists(st.tuples(st.floats(0.101, 3), st.integers(0, 50)), min_size=1, max_size=60))
def test_rates_lose_no_token(gaps: list[tuple[float, int]]) -> None:
    time, steps = 0.0, []
    for gap, tokens in gaps:
        time += gap
        steps.append(step(time, tokens))
    rates = run_charts.rates(steps, "num_output_tokens")
    span = time - (steps[0]["end_time"] - 0.1)
    width = span / len(rates)
    assert sum(rate * width for _, rate in rates) == pytest.approx(sum(tokens for _, tokens in gaps))
    assert rates[-1][0] == pytest.approx(time)


def test_merged_steps_are_drawn_as_their_mean() -> None:
    _, rows = split(run_charts.batch_composition([step(0.4, 8, num_steps=4)]))
    assert {row["series"]: (row["x"], row["y"]) for row in rows} == {
        "decode": (pytest.approx(0.0), 2.0),
        "prefill": (pytest.approx(0.0), 4.0),
    }


def test_latencies_leave_out_warm_up_and_failures() -> None:
    def row(**changes: Any) -> dict[str, Any]:
        request = {"warmup": False, "status": "finished", "ttft_ms": 5.0, "emission_times": [1.0, 1.5, 3.5]}
        return request | changes

    rows = [row(), row(warmup=True), row(status="failed"), row(ttft_ms=None, emission_times=[])]
    assert run_charts.latencies(rows, "ttft_ms") == [5.0]
    assert run_charts.latencies(rows, "itl_ms") == [500.0, 2000.0]


@pytest.mark.parametrize("field", ["num_output_tokens", "num_running", "kv_cache_usage"])
def test_overlaid_runs_keep_their_colours(field: str) -> None:
    colours = {"#1": palette.BASELINE, "#2": "#E69F00"}
    steps = {"#1": [step(0.1, 1), step(0.2, 1)], "#2": []}
    spec, _ = split(run_charts.overlaid(steps, colours, field, title="T", y_title="u"))
    scale = spec["layer"][1]["encoding"]["color"]["scale"]
    assert (scale["domain"], scale["range"]) == (["#1", "#2"], list(colours.values()))


def test_a_runs_colour_depends_on_its_place_and_the_baseline_is_grey() -> None:
    first, other = palette.run_colours([7, 8, 9], 7), palette.run_colours([7, 8, 9], 8)
    assert first[7] == other[8] == palette.BASELINE
    assert first[9] == other[9]
    assert len(set(first.values())) == 3


@pytest.mark.parametrize("picture", [run_charts.throughput, run_charts.batch_composition, run_charts.queue])
def test_a_single_step_can_be_drawn(picture: Any) -> None:
    assert split(picture([step(0.1, 4)]))[1]


def test_a_bar_shows_its_shares_and_reads_no_markup() -> None:
    html = share_bar_html("<b>", [Share("used", 1, "1", "#000000"), Share("free", 3, "<i>", "#111111")], "4")
    assert "width:25.000%" in html
    assert "width:75.000%" in html
    assert "<i>" not in html
    assert "&lt;b&gt;" in html
    assert "width:0.000%" in share_bar_html("t", [Share("none", 0, "0", "#000000")], "0")
