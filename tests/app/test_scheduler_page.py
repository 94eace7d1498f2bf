"""The Scheduler page: which runs, window and request it shows, and that what it draws and says is what the ledger holds."""

from __future__ import annotations

import io
from collections import Counter
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from streamlit.testing.v1 import AppTest

from app import formatting
from backend.analysis.batching import compare_batching
from backend.metrics.ledger_format import STEP_KINDS
from backend.metrics.live import LiveRun
from tests.app.kernel_runs import add_kernel_run
from tests.app.pages import page, press, words
from tests.app.schedule_runs import (
    ARRIVAL_SHIFT,
    SLOTS,
    add_schedule_run,
    end_run,
    feed_requests,
    feed_steps,
    start_schedule_run,
)
from tests.app.stored_runs import FakeServices, add_run
from tests.metrics.traffic import Traffic, traffic

SLIDER = "scheduler-slider"

Rows = list[dict[str, Any]]


def charts(app: AppTest, column: str) -> list[Rows]:
    """The rows of each chart whose data have such a column, in the order of the page."""
    found = []
    for element in app.get("vega_lite_chart"):
        with pa.ipc.open_stream(io.BytesIO(element.proto.data.data)) as reader:
            found.append(reader.read_all().to_pylist())
    return [rows for rows in found if column in rows[0]]


def gantts(app: AppTest) -> list[Rows]:
    return [[row for row in rows if row["part"] == "bar"] for rows in charts(app, "request_id")]


def column(rows: Rows, name: str) -> list[Any]:
    return [row[name] for row in rows]


def link_labels(app: AppTest) -> list[str]:
    return [link.label for link in app.get("page_link")]


def check_whole(rows: Rows, made: Traffic, shift: float) -> None:
    """Every request is drawn from its arrival to its end, and all that the ledger says it ran is in its bars."""
    assert list(dict.fromkeys(column(rows, "request_id"))) == sorted(made.arrivals, key=lambda key: made.arrivals[key])
    ran: Counter[str] = Counter()
    for step in made.steps:
        for entry in step.entries:
            ran[entry.request_id] += entry.num_scheduled_tokens
    for key in made.arrivals:
        bars = [row for row in rows if row["request_id"] == key]
        assert bars[0]["x"] == pytest.approx(made.arrivals[key] + shift, abs=1e-6)
        assert bars[-1]["x2"] == pytest.approx(made.finishes[key] + shift, abs=1e-6)
        assert sum(column(bars, "tokens")) == ran[key]
        assert column(bars, "x2")[:-1] == pytest.approx(column(bars, "x")[1:])


def test_an_empty_page_says_what_fills_it(services: FakeServices) -> None:
    app = page("scheduler")
    assert "Nothing has run yet" in words(app)
    assert "Start a run" in link_labels(app)


def test_it_begins_with_the_newest_run_that_has_a_ledger(services: FakeServices) -> None:
    run_id, made = add_schedule_run(services)
    add_run(services)
    add_kernel_run(services)
    app = page("scheduler")
    (rows,) = gantts(app)
    check_whole(rows, made, ARRIVAL_SHIFT)
    assert app.query_params == {"run": str(run_id)}
    figures = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    idle = 1 - sum(len(step.entries) for step in made.steps) / (SLOTS * len(made.steps))
    recomputed = sum(e.num_scheduled_tokens for s in made.steps for e in s.entries if e.kind == "recompute")
    preempted = [e.request_id for s in made.steps for e in s.events if e.kind == "preempt"]
    assert figures["Requests"] == ("40", "0 to warm up")
    assert figures["Steps"] == (str(len(made.steps)), f"of {SLOTS} slots")
    assert figures["Idle slots"][0] == f"{100 * idle:.1f} %"
    assert figures["Preemptions"] == (str(len(preempted)), f"{len(set(preempted))} requests")
    assert figures["Recomputed"][0] == str(recomputed)
    assert len(app.selectbox(key="scheduler-run").options) == 2, "the kernel run has no schedule"


def test_a_window_in_seconds_and_in_steps(services: FakeServices) -> None:
    run_id, made = add_schedule_run(services)
    app = page("scheduler", run=str(run_id), **{"from": "20", "to": "40"})
    (rows,) = gantts(app)
    inside = {
        k for k in made.arrivals if made.arrivals[k] + ARRIVAL_SHIFT < 40 and made.finishes[k] + ARRIVAL_SHIFT > 20
    }
    assert set(column(rows, "request_id")) == inside
    assert (min(column(rows, "x")), max(column(rows, "x2"))) == (20.0, 40.0)
    app.segmented_control(key="scheduler-unit").set_value("steps").run()
    app.slider(key=f"{SLIDER}-steps").set_value((5, 9)).run()
    steps = [row for row in charts(app, "y2")[0] if row["part"] == "tokens"]
    assert list(dict.fromkeys(column(steps, "steps"))) == ["5", "6", "7", "8", "9"]
    for number in range(5, 10):
        entries = made.steps[number].entries
        sums = {kind: sum(e.num_scheduled_tokens for e in entries if e.kind == kind) for kind in STEP_KINDS}
        drawn = {row["kind"]: row["tokens"] for row in steps if row["steps"] == str(number)}
        assert drawn == {kind: num_tokens for kind, num_tokens in sums.items() if num_tokens}
    begin, end = made.times[5][1] + ARRIVAL_SHIFT, made.times[10][1] + ARRIVAL_SHIFT
    assert float(app.query_params["from"]) == pytest.approx(begin, abs=1e-3)
    assert float(app.query_params["to"]) == pytest.approx(end, abs=1e-3)
    press(app, "Later")
    assert float(app.query_params["from"]) == pytest.approx((begin + end) / 2, abs=1e-3)
    press(app, "Whole run")
    assert "from" not in app.query_params
    check_whole(gantts(app)[0], made, ARRIVAL_SHIFT)


@pytest.mark.parametrize(("begin", "end"), [("x", "1"), ("5", "2"), ("nan", "1"), ("-100", "1e9")])
def test_a_window_that_makes_no_sense(services: FakeServices, begin: str, end: str) -> None:
    _, made = add_schedule_run(services)
    app = page("scheduler", **{"from": begin, "to": end})
    check_whole(gantts(app)[0], made, ARRIVAL_SHIFT)


def test_two_runs_on_one_axis(services: FakeServices) -> None:
    settings = {"num_blocks": 400, "budget": 1000, "max_prompt_len": 6, "all_at_once": True}
    static, slow = add_schedule_run(services, {"scheduler.batching": "static"}, traffic(batching="static", **settings))
    continuous, fast = add_schedule_run(services, {}, traffic(**settings))
    app = page("scheduler", run=str(static), beside=str(continuous))
    for rows, made in zip(gantts(app), (slow, fast), strict=True):
        check_whole(rows, made, -min(made.arrivals.values()))
    text = words(app)
    expected = compare_batching([len(times) for times in slow.emissions.values()], SLOTS)
    for run_id, schedule in ((static, expected.static), (continuous, expected.continuous)):
        share = f"#{run_id}: {100 * schedule.idle_slot_share:.1f} % of the slot-steps were idle"
        assert share in text
        assert f"({schedule.num_steps} steps of {SLOTS} slots)" in text
    tokens = [sum(map(len, made.emissions.values())) for made in (slow, fast)]
    lasted = [max(made.finishes.values()) - min(made.arrivals.values()) for made in (slow, fast)]
    ratio = (tokens[1] / lasted[1]) / (tokens[0] / lasted[0])
    assert f"#{continuous} has ×{ratio:.2f} the output throughput of #{static}" in text
    assert "They differ in scheduler.batching (static | continuous)." in text
    idle = [100 * schedule.idle_slot_share for schedule in (expected.continuous, expected.static)]
    assert f"prompts free: {idle[0]:.1f} % idle continuous, {idle[1]:.1f} % static" in text
    assert f"×{expected.static.num_steps / expected.continuous.num_steps:.2f} the output per step" in text
    assert not app.warning, "they were asked the same"
    assert app.query_params == {"run": str(static), "beside": str(continuous)}
    assert not app.get("segmented_control"), "their steps have different numbers"


def test_other_arrivals_are_warned_of(services: FakeServices) -> None:
    first, _ = add_schedule_run(services)
    second, _ = add_schedule_run(services, made=traffic(seed=6))
    (warning,) = page("scheduler", run=str(first), beside=str(second)).warning
    assert "not asked the same" in warning.value
    assert "requests arrived at other times" in warning.value


def test_a_run_beside_is_chosen_and_let_go(services: FakeServices) -> None:
    first, _ = add_schedule_run(services)
    second, _ = add_schedule_run(services)
    app = page("scheduler", run=str(first), **{"from": "20", "to": "40"})
    app.selectbox(key="scheduler-beside").set_value(second).run()
    assert app.query_params == {"run": str(first), "beside": str(second)}
    assert len(gantts(app)) == 2
    app.selectbox(key="scheduler-run").set_value(second).run()
    assert app.query_params == {"run": str(second)}, "a run is not beside itself"
    assert len(gantts(app)) == 1


def test_why_a_request_was_slow(services: FakeServices) -> None:
    run_id, made = add_schedule_run(services)
    key = max(made.arrivals, key=lambda key: made.emissions[key][0] - made.arrivals[key])
    app = page("scheduler", run=str(run_id))
    press(app, "Slowest first token")
    name = key.partition("-")[2]
    assert app.query_params == {"run": str(run_id), "request": name}
    assert app.selectbox(key="scheduler-request-select").value == name
    text = words(page("scheduler", run=str(run_id), request=name))
    ttft = made.emissions[key][0] - made.arrivals[key]
    gaps = [later - earlier for earlier, later in pairwise(made.emissions[key])]
    assert f"{made.prompt_lens[key]} prompt tokens, {len(made.emissions[key])} output tokens." in text
    assert f"The first token came {formatting.duration(ttft)} after the arrival (TTFT)." in text
    assert f"ended with delivery {gaps.index(max(gaps)) + 2}." in text
    spans, shared = app.dataframe[1].value, app.dataframe[0].value
    assert spans["ms"].sum() == pytest.approx((made.finishes[key] - made.arrivals[key]) * 1e3, abs=0.1)
    mine = {step.step for step in made.steps if any(entry.request_id == key for entry in step.entries)}
    others: Counter[str] = Counter()
    for step in mine:
        for entry in made.steps[step].entries:
            if entry.request_id != key and entry.kind != "decode":
                others[entry.request_id.partition("-")[2]] += entry.num_scheduled_tokens
    found = dict(zip(shared["Request"], shared["Prompt tokens"], strict=True))
    assert {name: tokens for name, tokens in found.items() if tokens} == others
    assert {row["request_id"] for row in gantts(app)[0] if not row["faint"]} == {key}


def test_a_request_in_two_runs_and_one_that_is_in_none(services: FakeServices) -> None:
    first, _ = add_schedule_run(services)
    second, _ = add_schedule_run(services)
    text = words(page("scheduler", run=str(first), beside=str(second), request="3"))
    assert f"Request 3 in #{first}" in text
    assert f"Request 3 in #{second}" in text
    app = page("scheduler", run=str(first), request="77")
    assert "There is no request 77 in this run" in words(app)
    app.run()
    assert "request" not in app.query_params


@pytest.mark.parametrize("asked", ["99", "x"])
def test_an_address_that_names_no_run(services: FakeServices, asked: str) -> None:
    run_id, _ = add_schedule_run(services)
    app = page("scheduler", run=asked)
    assert f"no run {asked}" in words(app)
    assert app.query_params["run"] == str(run_id)
    app = page("scheduler", run=str(run_id), beside=asked)
    assert f"no run {asked}" in words(app)
    assert app.query_params == {"run": str(run_id)}


def test_a_run_without_a_ledger_says_so(services: FakeServices) -> None:
    without = add_run(services)
    assert f"Run #{without} has no step ledger" in words(page("scheduler", run=str(without)))


def test_a_run_under_way_is_followed_until_somebody_looks_closer(services: FakeServices) -> None:
    """A look a second in a browser; here each is a rerun."""
    made = traffic()
    run_id, recorder = start_schedule_run(services)
    services.fake_queue.live_run = LiveRun(run_id)
    app = page("scheduler")
    assert "its schedule appears here with its first steps" in words(app)
    feed_steps(recorder, made, 0, 20)
    app.run()
    (rows,) = gantts(app)
    ran = {entry.request_id for step in made.steps[:20] for entry in step.entries}
    assert set(column(rows, "request_id")) == ran
    assert max(column(rows, "x2")) == pytest.approx(made.times[19][2] + ARRIVAL_SHIFT)
    assert not app.slider
    requests = feed_requests(recorder, made, made.times[39][2])
    feed_steps(recorder, made, 20, 40)
    app.run()
    assert max(column(gantts(app)[0], "x2")) == pytest.approx(made.times[39][2] + ARRIVAL_SHIFT)
    app.toggle[0].set_value(False).run()
    app.slider(key=SLIDER).set_value((20.0, 30.0)).run()
    assert app.query_params["from"].startswith("20.0")
    feed_steps(recorder, made, 40, len(made.steps))
    app.run()
    assert max(column(gantts(app)[0], "x2")) == pytest.approx(30.0, abs=0.2)
    requests += [it for it in feed_requests(recorder, made, 1e9) if it not in requests]
    end_run(recorder, made, requests, "finished")
    app.toggle[0].set_value(True).run()
    assert not app.toggle
    assert "from" not in app.query_params


def test_runs_are_linked_from_their_details_and_comparison(services: FakeServices) -> None:
    first, second = add_run(services), add_run(services)
    assert "Schedule" in link_labels(page("detail", run=str(first)))
    app = page("compare", runs=f"{first},{second}")
    assert "Their schedules on one time axis" in link_labels(app)
