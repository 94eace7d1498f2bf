"""What the Quantization page offers and shows of sensitivity scans and of ranges, and the addresses that lead to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app import resources
from app.components import quantization_scan_charts
from app.components.quantization_scans import BY, VARIANT, find
from app.services import Services, start_quantization_run
from backend.experiments.quantization_config import REFERENCE, QuantizationLabConfig
from backend.experiments.quantization_ranges import furthest, stored_ranges
from backend.experiments.quantization_results import scanned_layers
from backend.experiments.ranges import EXPECTED_ORDER
from backend.metrics.live import LiveRun
from backend.metrics.stats import Phase, RunStatus
from tests.app.pages import page, press, words
from tests.app.quantization_runs import (
    NUM_LAYERS,
    add_quantization_run,
    emulated,
    layer_costs,
    ranges,
    reference,
    result,
    scan,
)
from tests.app.stored_runs import FakeServices

KIND_COSTS = {"qkv": 0.1, "down": 0.3, "all": 0.5}


def labels(app: AppTest) -> list[str]:
    return [button.label for button in app.button]


def tables(app: AppTest) -> list[list[dict[str, object]]]:
    return [element.value.to_dict("records") for element in app.dataframe]


def charted(app: AppTest) -> str:
    """The data of the picture by kind of layer."""
    (chart,) = [each for each in app.get("vega_lite_chart") if "One kind of layer" in each.proto.spec]
    return str(chart.proto.datasets)


def add_scan(services: FakeServices, variant: str, by: str) -> int:
    costs = KIND_COSTS if by == "kind" else layer_costs(0.01)
    return add_quantization_run(services, scan(variant, costs), experiment="sensitivity", by=by)


@pytest.mark.parametrize(
    ("by", "what"), [("kind", "one kind of layer at a time"), ("layer", "one linear layer at a time")]
)
def test_a_scan_is_queued_as_it_is_chosen(services: FakeServices, by: str, what: str) -> None:
    add_quantization_run(services, max_tokens=512)
    app = page("quantization", view="Sensitivity")
    app.segmented_control(key=BY).set_value(by).run()
    assert f"quantizes {what}" in words(app)
    press(app, "Scan")
    queued = services.repository.get(2)
    assert queued is not None
    assert (queued.kind, queued.status, queued.model) == ("quantization", "queued", "dummy:tiny")
    asked = {"experiment": "sensitivity", "by": by, "variants": ["nf4"], "max_tokens": 512}
    assert {name: queued.config[name] for name in asked} == asked
    assert app.query_params["run"] == "1"
    assert "Run #2 is to find it out" in words(app)


def test_both_scans_of_a_variant_are_shown_one_beside_a_choice_of_the_other(services: FakeServices) -> None:
    add_quantization_run(services)
    add_scan(services, "int8", "kind")
    add_scan(services, "int8", "layer")
    app = page("quantization", view="Sensitivity")
    assert app.selectbox(key=VARIANT).value == "int8", "the one that is scanned, not the one that loses most"
    assert app.segmented_control(key=BY).value == "kind"
    assert "Run #2, 2,046 tokens" in words(app)
    app.segmented_control(key=BY).set_value("layer").run()
    assert not app.exception
    text = words(app)
    assert "Run #3, 2,046 tokens" in text
    assert "Run #2" not in text
    # Eleven layers with a cost: ten of 0.01 and one of 0.1, of twelve.
    assert "All layers together cost 0.150 nats; one by one they add up to 0.200" in text
    assert "the costliest 1 of 12 have 50.0 %" in text
    rows = tables(app)[0]
    columns = json.loads(app.dataframe[0].proto.columns)
    assert columns["KL, nats"]["type_config"]["format"] == "%.3g", "four decimals would make small costs alike"
    assert rows[0] == {"Layer": 1, "Kind": "Down", "KL, nats": 0.1, "Perplexity": 20.5}
    assert len(rows) == 8
    app.selectbox(key=VARIANT).set_value("nf4").run()
    assert "Not scanned yet" in words(app)


def test_the_scan_that_there_is_shows_until_somebody_chooses_the_other_one(services: FakeServices) -> None:
    add_quantization_run(services)
    app = page("quantization", view="Sensitivity")
    assert app.segmented_control(key=BY).value == "kind"
    add_scan(services, "nf4", "layer")
    app.run()
    assert app.segmented_control(key=BY).value == "layer"
    assert "Run #2, 2,046 tokens" in words(app)
    app.segmented_control(key=BY).set_value("kind").run()
    assert "Not scanned yet" in words(app)
    assert "Run #2 scanned it: **One layer at a time**" in words(app)
    app.run()
    assert app.segmented_control(key=BY).value == "kind"
    opened = page("quantization", view="Sensitivity", by="Kind of layer")
    assert opened.segmented_control(key=BY).value == "kind", "an address says what it shows"
    assert "Run #2 scanned it" in words(opened)


@pytest.mark.parametrize("name", ["text", "calibration"])
def test_a_scan_of_other_texts_is_not_the_runs(services: FakeServices, name: str) -> None:
    add_quantization_run(services)
    add_scan(services, "int8", "kind")
    run, same = services.repository.get(1), services.repository.get(2)
    assert run is not None
    assert same is not None
    services.repository.create(same.config | {name: "/other.txt"}, {}, kind="quantization")
    (found,) = find(services, run, experiment="sensitivity", by="kind").values()
    assert [scan.run_id for scan in found] == [2]


def test_a_scan_by_another_version_is_one_by_kind(services: FakeServices) -> None:
    add_quantization_run(services)
    add_scan(services, "int8", "kind")
    older = services.repository.get(2)
    assert older is not None
    config = {name: value for name, value in older.config.items() if name != "by"}
    run_id = services.repository.create(config, {}, kind="quantization")
    for row in scan("int8", KIND_COSTS):
        services.repository.add_quantization_result(run_id, row)
    services.repository.delete([2])
    app = page("quantization", run=str(run_id))
    assert app.query_params["run"] == "1"
    assert (app.query_params["view"], app.query_params["by"]) == ("Sensitivity", "Kind of layer")


@pytest.mark.parametrize(("by", "shown"), [("kind", "Kind of layer"), ("layer", "One layer at a time")])
def test_a_scans_address_leads_to_it_in_its_run(services: FakeServices, by: str, shown: str) -> None:
    add_quantization_run(services)
    add_scan(services, "nf4", "kind")
    add_scan(services, "int8", by)
    app = page("quantization", run="3")
    assert "no quantization run" not in words(app)
    found = {name: app.query_params[name] for name in ("run", "view", "variant", "by")}
    assert found == {"run": "1", "view": "Sensitivity", "variant": "int8", "by": shown}
    assert "Run #3, 2,046 tokens" in words(app)
    assert f"sensitivity{' by layer' if by == 'layer' else ''}: int8" in list(
        page("history").dataframe[0].value["workload"]
    )


def test_how_far_it_is_stands_on_the_page_without_an_empty_matrix(services: FakeServices) -> None:
    add_quantization_run(services)
    app = page("quantization", view="Sensitivity")
    press(app, "Scan")
    for row in scan("nf4", KIND_COSTS):
        services.repository.add_quantization_result(2, row)
    live = services.fake_queue.live_run = LiveRun(2)
    live.on_phase(Phase("nf4: scanning", 30, 121, "parts"))
    app.run()
    (progress,) = app.get("progress")
    assert "nf4: scanning 30 of 121 parts" in progress.proto.text
    assert "Add scan to queue" in labels(app)
    assert len([each for each in app.get("html") if "sl-matrix" in each.proto.body]) == 1
    press(app, "Cancel")
    assert services.fake_queue.cancelled == [2]


def test_a_scan_that_failed_says_why_and_the_one_before_stays(services: FakeServices) -> None:
    add_quantization_run(services, [reference(), result("int8")])
    asked = {"experiment": "sensitivity", "by": "layer"}
    problem = {"variant": "int8", "problem": "the disk is full"}
    add_quantization_run(services, [problem], status="failed", error="int8: the disk is full", **asked)
    app = page("quantization", view="Sensitivity", by="One layer at a time")
    assert "int8: the disk is full" in words(app)
    add_scan(services, "int8", "layer")
    add_quantization_run(services, [problem], status="cancelled", **asked)
    app = page("quantization", view="Sensitivity", by="One layer at a time")
    assert "Run #4 was cancelled" in words(app)
    assert "Run #3, 2,046 tokens" in words(app)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("cancelled", "int8: cancelled after 2 of 5 parts, which are kept"),
        ("failed", "int8: RuntimeError: a kernel broke"),
        ("interrupted", None),
    ],
)
def test_a_part_of_a_scan_is_shown_for_want_of_a_whole_one(
    services: FakeServices, status: RunStatus, error: str | None
) -> None:
    add_quantization_run(services, [reference(), result("int8")])
    parts = scan("int8", {"qkv": 0.1, "output": 0.2})
    rows = [*parts, {"variant": "int8", "problem": "a kernel broke"}] if status == "failed" else parts
    add_quantization_run(services, rows, status=status, error=error, experiment="sensitivity")
    app = page("quantization", view="Sensitivity", by="Kind of layer")
    assert (error or "The process that ran it ended") in words(app)
    assert "Run #2, 2,046 tokens" in words(app)
    assert "All of them" not in charted(app)
    add_scan(services, "int8", "kind")
    app = page("quantization", view="Sensitivity", by="Kind of layer")
    assert (error or "The process that ran it ended") not in words(app)
    assert "All of them" in charted(app)
    assert "Run #3, 2,046 tokens" in words(app)
    add_quantization_run(services, rows, status=status, error=error, experiment="sensitivity")
    app = page("quantization", view="Sensitivity", by="Kind of layer")
    assert (error or "The process that ran it ended") in words(app)
    assert "Run #3, 2,046 tokens" in words(app), "a whole one is not given up for a part"


def test_what_has_no_layers_to_exchange_is_not_offered(services: FakeServices) -> None:
    folded = result("awq", layers=None, layers_problem="it is another model")
    add_quantization_run(services, [reference(), folded, result("none:kv=int8", layers=None, num_layers=0)])
    assert "No variant of this run has layers" in words(page("quantization", view="Sensitivity"))
    assert page("quantization", view="Ranges").selectbox(key=VARIANT).options == ["awq"]
    add_quantization_run(services, [reference(), result("int8", layers=None)], layers=False)
    assert "Scan" in labels(page("quantization", view="Sensitivity")), "a run without layers' errors can be scanned"


# Ranges


def test_ranges_are_queued_and_shown_beside_the_originals(services: FakeServices) -> None:
    add_quantization_run(services, [reference(), result("int8"), emulated("nf4")])
    app = page("quantization", view="Ranges")
    assert "Not measured yet" in words(app)
    press(app, "Measure ranges")
    queued = services.repository.get(2)
    assert queued is not None
    assert (queued.config["experiment"], queued.config["variants"]) == ("ranges", ["nf4"])
    add_quantization_run(services, [*ranges(REFERENCE), *ranges("int8", 1.5)], experiment="ranges")
    app = page("quantization", run="3")
    found = {name: app.query_params[name] for name in ("run", "view", "variant")}
    assert found == {"run": "1", "view": "Ranges", "variant": "int8"}
    text = words(app)
    assert "Of int8, by what 99.9 % of the values stay below: activations < weights < KV < attention logits" in text
    assert "commonly expected is weights < activations < KV < attention logits" in text
    # 300 is the end of a grid with 127 steps on each side, 3 is 1.27 of them.
    assert "those of layer 1 (Down, input 7) reach furthest beyond the rest, 100 times as far as 99.9 % of them" in text
    assert "those would share 3 of the 255 codes" in text
    assert "Run #3, 1,024 tokens" in text
    groups, outliers = tables(app)
    assert [row["Values"] for row in groups] == list(EXPECTED_ORDER)
    assert groups[1] == {
        "Values": "activations",
        "Largest": 450.0,
        "Of the original": 300.0,
        "Where": "layer 1, Down, input 7",
        "99.9 %, median layer": 4.5,
        "Kurtosis, median layer": 4.0,
    }
    assert outliers[0] == {
        "Values": "activations",
        "Layer": 1,
        "Where": "Down, input 7",
        "Largest": 300.0,
        "Times its 99.9 %": 100.0,
        "Of the variant": 450.0,
    }
    assert len(app.get("vega_lite_chart")) == 1 + 4
    assert "ranges: int8" in list(page("history").dataframe[0].value["workload"])


def test_what_the_buttons_start_comes_to_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an engine behind the page."""
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    with Services.open(f"sqlite:///{tmp_path / 'servelab.db'}") as services:
        resources.install(services)
        try:
            config = {"model": "dummy:tiny", "variants": ["nf4"], "max_tokens": 128, "speed": False}
            services.queue.wait(start_quantization_run(services, QuantizationLabConfig.from_dict(config)))
            for run_id, by in enumerate(("layer", "kind"), 2):
                app = page("quantization", view="Sensitivity")
                app.segmented_control(key=BY).set_value(by).run()
                press(app, "Scan")
                services.queue.wait(run_id)
                app.run()
                assert f"Run #{run_id}, 127 tokens" in words(app)
            app = page("quantization", view="Ranges")
            press(app, "Measure ranges")
            services.queue.wait(4)
            app.run()
            assert "Run #4, 128 tokens" in words(app)
            assert len(tables(app)[0]) == 4
            assert {run.status for run in services.repository.list()} == {"finished"}
        finally:
            resources.install(None)


# Pictures, by their specs


def test_a_cell_for_each_layer_and_none_for_no_cost() -> None:
    cells = scanned_layers(scan("int8", layer_costs(0.01)))
    spec = quantization_scan_charts.by_layer(cells).to_dict()
    (data,) = spec["datasets"].values()
    assert len(data) == 4 * NUM_LAYERS
    assert [(row["layer"], row["kind"]) for row in data if row["shown"] is None] == [(0, "Queries, keys, values")]
    assert spec["layer"][0]["encoding"]["color"]["scale"]["domain"] == [0.01, 0.1]
    free = [cell | {"kl_mean": 0.0} for cell in cells]
    assert quantization_scan_charts.by_layer(free).to_dict()["layer"]


def test_reaches_have_a_line_for_the_variant_and_one_for_the_original() -> None:
    rows = [*ranges(REFERENCE), *ranges("int8", 1.5)]
    variant, original = (furthest(stored_ranges(rows, name), "activations") for name in ("int8", REFERENCE))
    spec = quantization_scan_charts.reach("activations", variant, original).to_dict()
    (data,) = spec["datasets"].values()
    values = {
        series: [row["value"] for row in data if row["series"] == series] for series in {row["series"] for row in data}
    }
    assert values == {
        quantization_scan_charts.ORIGINAL: [6, 300, 6],
        quantization_scan_charts.VARIANT: [9, 450, 9],
        quantization_scan_charts.REST: [4.5, 4.5, 4.5],
    }
    low, high = spec["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert low < 4.5
    assert high > 450
    assert quantization_scan_charts.reach("activations", [], []).to_dict()["layer"]
