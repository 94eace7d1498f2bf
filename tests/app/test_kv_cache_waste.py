"""Waste on the KV cache page: by kind, over whole runs that were really made, and of two runs on the same arrivals."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pytest
from streamlit.testing.v1 import AppTest

from app import formatting, resources
from app.components import widgets
from app.components.kv_cache_waste_chart import PARTS
from app.services import Services
from app.state import default_values, read_form
from backend.metrics.kv_use import KVPool
from backend.metrics.ledger import LEDGER_KIND
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.waste_history import WasteHistory
from db.run_rows import Run
from db.session import Database
from tests.app.kv_runs import BLOCK_SIZE, NUM_BLOCKS, NUM_STEPS, add_kv_run, end, feed, start_kv_run, traffic
from tests.app.pages import page, press, words
from tests.app.stored_runs import FakeServices
from tests.app.waste_runs import first_measured, make_runs, truth, wasted

BESIDE = "kv-beside"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Services, dict[str, int]]]:
    """Runs of an engine, by name."""
    with Services(Database.open(f"sqlite:///{tmp_path_factory.mktemp('waste') / 'servelab.db'}")) as services:
        yield services, make_runs(services)


@pytest.fixture
def run_ids(made: tuple[Services, dict[str, int]]) -> Iterator[dict[str, int]]:
    """With the pages looking at them."""
    resources.install(made[0])
    yield made[1]
    resources.install(None)


def charts(app: AppTest) -> list[list[dict[str, Any]]]:
    """The rows of each chart of waste, in the order of the page."""
    found = []
    for element in app.get("vega_lite_chart"):
        with pa.ipc.open_stream(io.BytesIO(element.proto.data.data)) as reader:
            found.append(reader.read_all().to_pylist())
    return [rows for rows in found if "wasted" in rows[0]]


def of_kind(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.parametrize("name", ["paged", "contiguous", "prefix caching", "swap", "window"])
def test_every_step_of_a_run(made: tuple[Services, dict[str, int]], name: str) -> None:
    services, run_ids = made
    run = services.repository.get(run_ids[name])
    assert run is not None
    assert run.resolved_config
    assert run.load
    pool = KVPool.of_run(run.resolved_config, run.load["model"], run.load["num_blocks"])
    history, expected = WasteHistory(run.resolved_config["cache"]["block_size"], pool), truth(services, run)
    history.extend(services.repository.chunks(run.run_id, LEDGER_KIND))
    assert [asdict(history.at(step)) for step in history.steps] == expected
    kinds = {event.kind for step in _steps(services, run) for event in step.events}
    seen = {
        "paged": any(figures["num_unused_slots"] for figures in expected),
        "contiguous": all(figures["num_reserved_slots"] for figures in expected if figures["num_requests"])
        and any(figures["num_unusable_slots"] for figures in expected),
        "prefix caching": "share" in kinds and any(figures["num_saved_slots"] for figures in expected),
        "swap": {"swap_out", "swap_in"} <= kinds,
        "window": "slide" in kinds and any(figures["num_passed_slots"] for figures in expected),
    }
    assert seen[name]


def _steps(services: Services, run: Run) -> list[Any]:
    reader = LedgerReader(services.repository.chunks(run.run_id, LEDGER_KIND))
    return list(reader.read(reader.steps.start, reader.steps.stop))


@pytest.mark.parametrize("name", ["contiguous", "prefix caching", "window"])
def test_the_picture_of_one_run(run_ids: dict[str, int], name: str) -> None:
    services = resources.get_services()
    run = services.repository.get(run_ids[name])
    assert run is not None
    expected = truth(services, run)
    app = page("kv_cache", run=str(run.run_id), step="7")
    (rows,) = charts(app)
    points, figures = of_kind(rows, "point"), expected
    assert [point["step"] for point in points] == [*range(len(figures)), len(figures) - 1], "all of them, and the end"
    assert [point["x"] for point in points] == [float(step) for step in range(len(figures) + 1)]
    labels = {field: label for field, label, _ in PARTS}
    for point, each in zip(points, figures, strict=False):
        parts = {field: each[field] for field in labels if field in each}
        parts["num_used_slots"] = each["num_slots"] - wasted(each)
        for field, value in parts.items():
            assert point.get(labels[field], 0) == value
        assert point["wasted"] == pytest.approx(wasted(each) / each["num_slots"] if each["num_slots"] else None)
        assert point["without sharing"] == each["num_slots"] + each["num_saved_slots"]
        assert point["requests"] == each["num_requests"]
    assert [row["x"] for row in of_kind(rows, "mark")] == [7.5]
    measured = expected[first_measured(services, run) :]
    share = sum(map(wasted, measured)) / sum(each["num_slots"] for each in measured)
    most = max(each["num_requests"] for each in measured)
    said = f"{formatting.percent(share)} of the held KV slots were wasted; at most {most} requests held blocks at once"
    assert said in words(app)
    assert not app.query_params.get("with")


def test_two_runs_on_the_same_arrivals(run_ids: dict[str, int]) -> None:
    services, pair = resources.get_services(), [run_ids["paged"], run_ids["contiguous"]]
    app = page("kv_cache", run=str(pair[0]), step="20")
    box = app.selectbox(key=BESIDE)
    offered = [option.partition(":")[0] for option in box.options]
    assert offered == [f"#{pair[1]}", f"#{run_ids['swap']}"], "another layout first, other requests never"
    assert "contiguous" in box.options[0]
    assert len(charts(app)) == 1
    box.set_value(pair[1]).run()
    assert not app.exception
    assert (app.query_params["run"], app.query_params["with"]) == (str(pair[0]), str(pair[1]))
    shares, most = [], []
    drawn = charts(app)
    frames = [[(row["x"], row["y"]) for row in of_kind(rows, "frame")] for rows in drawn]
    assert frames[0] == frames[1], "the same axes"
    ends, highest = [], 0
    for run_id, rows in zip(pair, drawn, strict=True):
        run = services.repository.get(run_id)
        assert run is not None
        first = first_measured(services, run)
        measured = truth(services, run)[first:]
        shares.append(formatting.percent(sum(map(wasted, measured)) / sum(each["num_slots"] for each in measured)))
        most.append(max(each["num_requests"] for each in measured))
        points = of_kind(rows, "point")
        arrival = min(row["arrival_time"] for row in services.repository.requests(run_id) if not row["warmup"])
        times = services.repository.step_times(run_id)[first:]
        expected = [start - arrival for _, start, _ in times] + [times[-1][2] - arrival]
        assert [point["x"] for point in points] == pytest.approx(expected)
        assert [point["step"] for point in points[:-1]] == [each["step"] for each in measured]
        ends.append(expected[-1])
        highest = max(highest, *(each["num_slots"] + each["num_unusable_slots"] for each in measured))
    assert frames[0][0] == (0.0, 0.0)
    assert frames[0][1][0] == pytest.approx(max(ends))
    assert highest <= frames[0][1][1] < 2 * highest
    assert [len(of_kind(rows, "mark")) for rows in drawn] == [1, 0]
    text = words(app)
    assert f"#{pair[0]} (paged) wasted {shares[0]} and #{pair[1]} (contiguous) {shares[1]}" in text
    assert f"at most {most[0]} and {most[1]} requests held blocks at once" in text
    assert "not asked the same" not in text
    assert "No stored run has the same requests" not in text
    again = page("kv_cache", run=str(pair[0]), **{"with": str(pair[1])})
    assert again.selectbox(key=BESIDE).value == pair[1]
    assert len(charts(again)) == 2
    app.selectbox(key=BESIDE).set_value(None).run()
    assert "with" not in app.query_params
    assert len(charts(app)) == 1


def test_the_run_beside_outlives_a_look_at_the_other_tab(run_ids: dict[str, int]) -> None:
    app = page("kv_cache", run=str(run_ids["paged"]), **{"with": str(run_ids["contiguous"])})
    app.session_state["view"] = "Prefix cache"
    app.run()
    assert not charts(app)
    assert app.query_params["with"] == str(run_ids["contiguous"])
    app.session_state["view"] = "Blocks"
    app.run()
    assert len(charts(app)) == 2
    app.selectbox(key="kv-run").set_value(run_ids["swap"]).run()
    assert "with" not in app.query_params
    assert len(charts(app)) == 1


def test_a_run_beside_that_was_asked_something_else(run_ids: dict[str, int]) -> None:
    app = page("kv_cache", run=str(run_ids["paged"]), **{"with": str(run_ids["prefix caching"])})
    assert "These runs were not asked the same" in words(app)
    assert "one has 12 requests and the other 10" in words(app)
    assert len(charts(app)) == 2


@pytest.mark.parametrize("asked", ["999", "x"])
def test_a_run_beside_that_is_not_there(run_ids: dict[str, int], asked: str) -> None:
    app = page("kv_cache", run=str(run_ids["paged"]), **{"with": asked})
    assert f"There is no run {asked} to show beside" in words(app)
    assert len(charts(app)) == 1
    assert "with" not in app.query_params


def test_a_layout_that_is_missing_is_one_press_away(run_ids: dict[str, int]) -> None:
    services = resources.get_services()
    run = services.repository.get(run_ids["prefix caching"])
    assert run is not None
    app = page("kv_cache", run=str(run.run_id))
    assert "No stored run has the same requests and another `cache.layout`" in words(app)
    press(app, "Set up the same run, contiguous")
    assert app.title[0].value == "Run"
    form = {key: app.session_state[widgets.key_of(key)] for key in default_values()}
    config, workload = read_form(form)
    assert config.to_dict() == run.config | {"cache": run.config["cache"] | {"layout": "contiguous"}}
    assert workload.to_dict() == run.workload


def test_arrivals_that_no_other_run_can_have(run_ids: dict[str, int]) -> None:
    app = page("kv_cache", run=str(run_ids["closed loop"]))
    assert "no run with another `cache.layout` has the same arrivals" in words(app)
    assert not [button for button in app.button if button.label.startswith("Set up")]


def test_a_run_under_way_has_its_waste_drawn_as_far_as_it_is_stored(services: FakeServices) -> None:
    run_id, recorder = start_kv_run(services)
    made = traffic(run_id)
    app = page("kv_cache", run=str(run_id))
    assert not charts(app)
    for begin, stop, chunks in ((0, 16, made.chunks[:1]), (16, 32, made.chunks[1:2]), (32, NUM_STEPS, made.chunks[2:])):
        feed(recorder, made.steps[begin:stop], chunks)
        app.run()
        (rows,) = charts(app)
        points = of_kind(rows, "point")
        assert [point["step"] for point in points[:-1]] == list(range(stop))
        held = [sum(point.get(label) or 0 for _, label, _ in PARTS) for point in points[:-1]]
        assert held == [step.num_referenced_blocks * BLOCK_SIZE for step in made.steps[:stop]]
        assert [row["x"] for row in of_kind(rows, "mark")] == [stop - 0.5]
    end(recorder)
    app.run()
    assert len(charts(app)) == 1


def test_a_ledger_without_events_has_no_waste(services: FakeServices) -> None:
    run_id, _ = add_kv_run(services, with_events=False)
    app = page("kv_cache", run=str(run_id))
    assert not charts(app)
    assert "Waste over the run" not in words(app)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_free_blocks_that_no_request_can_get(services: FakeServices, layout: str) -> None:
    """25 blocks to a request of 100 tokens: fewer free ones are of no use to anybody."""
    run_id, recorder = start_kv_run(services, {"cache.layout": layout})
    made = traffic(run_id)
    feed(recorder, made.steps, made.chunks)
    end(recorder)
    free = made.steps[7].num_free_blocks
    assert 0 < free < 25 < NUM_BLOCKS
    app = page("kv_cache", run=str(run_id), step="7")
    shown = " ".join(element.proto.body for element in app.get("html"))
    unusable = re.findall(r"free, but too few for a request <b>(\d+)</b>", shown)
    assert unusable == ([str(free * BLOCK_SIZE)] if layout == "contiguous" else [])
    figure = next(metric for metric in app.metric if metric.label == "Free")
    lost = f", {free} unusable" if layout == "contiguous" else ""
    assert (figure.value, figure.delta) == (str(free), f"of {NUM_BLOCKS} blocks{lost}")
