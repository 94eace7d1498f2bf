"""The Run page: what the form starts, and what any viewer sees of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app.components import widgets
from app.components.form_fields import ARRIVALS, LABEL, OVERRIDES, SOURCE
from backend.config import EngineConfig
from backend.metrics.live import LiveRun
from backend.metrics.stats import RunEnd
from backend.workload.spec import TraceTimes, Workload
from tests.app.pages import DASHBOARD, page, press, words
from tests.app.stored_runs import FakeServices, add_run, feed, feed_start


def test_the_bare_address_is_the_run_page(services: FakeServices) -> None:
    app = AppTest.from_file(DASHBOARD, default_timeout=60).run()
    assert [title.value for title in app.title] == ["Run"]
    assert "Nothing has run yet" in words(app)
    assert not app.exception


def test_no_two_fields_have_the_same_name(services: FakeServices) -> None:
    app = page()
    kinds = (app.selectbox, app.number_input, app.text_input, app.text_area, app.toggle)
    labels = [element.label for kind in kinds for element in kind]
    assert {"Quantization", "Who drafts", "Keys and values"} < set(labels)
    assert sorted(labels) == sorted(set(labels))


def test_the_untouched_form_starts_the_default_run(services: FakeServices) -> None:
    press(page(), "Start")
    assert services.fake_queue.submitted == [(1, EngineConfig(), Workload())]
    run = services.repository.get(1)
    assert run is not None
    assert (run.config, run.workload) == (EngineConfig().to_dict(), Workload().to_dict())


def test_two_presses_are_one_run(services: FakeServices) -> None:
    app = page()
    press(app, "Start")
    press(app, "Start")
    assert [run.run_id for run in services.repository.list()] == [1]


def test_two_different_runs_are_two(services: FakeServices) -> None:
    app = page()
    press(app, "Start")
    app.text_input(key=widgets.key_of(LABEL)).set_value("again").run()
    press(app, "Start")
    assert [run.label for run in services.repository.list()] == ["again", None]


def test_the_form_is_read(services: FakeServices) -> None:
    app = page()
    app.selectbox(key=widgets.key_of("model.name")).set_value("dummy:tiny")
    app.selectbox(key=widgets.key_of(SOURCE)).set_value("synthetic").run()
    app.number_input(key=widgets.key_of("workload.source.num_requests")).set_value(8)
    app.number_input(key=widgets.key_of("scheduler.max_num_seqs")).set_value(2)
    app.text_area(key=widgets.key_of(OVERRIDES)).set_value("workload.seed = 3").run()
    press(app, "Start")
    _, config, workload = services.fake_queue.submitted[0]
    assert config == EngineConfig().with_overrides({"model.name": "dummy:tiny", "scheduler.max_num_seqs": 2})
    assert workload.to_dict()["source"] == {"kind": "synthetic", "num_requests": 8, "prompt_len": 128}
    assert workload.seed == 3


def test_a_trace_that_is_chosen_brings_its_times_and_takes_them_along(services: FakeServices, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    app = page()
    app.selectbox(key=widgets.key_of(SOURCE)).set_value("trace").run()
    assert app.selectbox(key=widgets.key_of(ARRIVALS)).value == "trace"
    app.text_input(key=widgets.key_of("workload.source.file")).set_value(str(path))
    app.number_input(key=widgets.key_of("workload.arrivals.speedup")).set_value(2.0).run()
    press(app, "Start")
    app.selectbox(key=widgets.key_of(SOURCE)).set_value("conversations").run()
    assert app.selectbox(key=widgets.key_of(ARRIVALS)).value == "all_at_once"
    app.number_input(key=widgets.key_of("workload.source.turns.value")).set_value(3)
    app.number_input(key=widgets.key_of("workload.source.think_time_s")).set_value(0.5)
    app.selectbox(key=widgets.key_of(ARRIVALS)).set_value("gamma").run()
    app.selectbox(key=widgets.key_of(SOURCE)).set_value("shared_prefix").run()
    app.selectbox(key=widgets.key_of(SOURCE)).set_value("conversations").run()
    press(app, "Start")
    trace, conversations = (workload for _, _, workload in services.fake_queue.submitted)
    assert trace == Workload.from_dict({"source": {"kind": "trace", "file": str(path)}}).with_overrides(
        {"arrivals": TraceTimes(speedup=2.0).to_dict()}
    )
    assert conversations == Workload.from_dict(
        {
            "source": {"kind": "conversations", "turns": 3, "think_time_s": 0.5},
            "arrivals": {"kind": "gamma", "rate": 4.0},
        }
    )


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("cache.blocksize = 8", "cache.blocksize"),
        ("model.name = nowhere", "nowhere"),
        ("workload.seed = -5", "seed = -5"),
        ("workload.source.file = /nowhere.jsonl", "/nowhere.jsonl"),
    ],
)
def test_a_wrong_setting_is_said_beside_the_form_and_nothing_is_lost(
    services: FakeServices, line: str, named: str
) -> None:
    app = page()
    app.number_input(key=widgets.key_of("workload.output_len.value")).set_value(7)
    app.text_area(key=widgets.key_of(OVERRIDES)).set_value(line).run()
    press(app, "Start")
    assert [named in error.value for error in app.error] == [True]
    assert services.repository.list() == []
    assert app.text_area(key=widgets.key_of(OVERRIDES)).value == line
    assert app.number_input(key=widgets.key_of("workload.output_len.value")).value == 7


def test_a_run_under_way_is_seen_by_any_viewer_and_can_be_cancelled(services: FakeServices) -> None:
    live = services.fake_queue.live_run = LiveRun(
        services.repository.create(EngineConfig().to_dict(), Workload().to_dict())
    )
    feed_start(live, EngineConfig())
    for viewer in (page(), page()):
        assert "Run #1" in words(viewer)
        assert [metric.label for metric in viewer.metric] == [
            "Output",
            "TTFT p50",
            "TPOT p50",
            "Running / waiting",
            "KV in use",
        ]
        assert viewer.metric[3].value == "4 / 0"
        assert "Add to queue" in [button.label for button in viewer.button]
    press(viewer, "Cancel")
    assert services.fake_queue.cancelled == [1]


def test_a_finished_run_shows_its_headline_and_where_to_go(stored: FakeServices) -> None:
    run_id = add_run(stored)
    live = stored.fake_queue.live_run = LiveRun(run_id)
    feed(live, EngineConfig())
    app = page()
    assert "Start" in [button.label for button in app.button]
    assert app.metric[0].value == "80.0 tok/s"
    assert "finished" in words(app)


def test_a_failed_run_says_why(services: FakeServices) -> None:
    run_id = add_run(services, status="failed", error="out of memory: lower cache.cpu_bytes")
    live = services.fake_queue.live_run = LiveRun(run_id)
    live.on_run_end(RunEnd("failed", 1.0, None, "out of memory: lower cache.cpu_bytes"))
    assert "out of memory: lower cache.cpu_bytes" in words(page())


def test_a_number_out_of_bounds_reaches_the_settings_and_is_refused(services: FakeServices) -> None:
    """A browser would keep it to itself, had its field bounds, and another run would start than the form shows."""
    app = page()
    for key, value in (("workload.seed", -5), ("scheduler.max_num_seqs", 0), ("workload.output_len.value", 0)):
        field = app.number_input(key=widgets.key_of(key))
        assert (field.proto.has_min, field.proto.has_max) == (False, False)
        before = field.value
        field.set_value(value).run()
        press(app, "Start")
        assert [
            f"{key.removeprefix('workload.').removesuffix('.value')} = {value}" in error.value for error in app.error
        ] == [True]
        app.number_input(key=widgets.key_of(key)).set_value(before).run()
    assert services.repository.list() == []
