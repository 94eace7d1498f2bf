"""History, Detail and Compare in every state they can be met in: they say what they should, and never show an exception."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from sqlalchemy import update
from streamlit.testing.v1 import AppTest

from app import resources
from app.components import widgets
from app.components.form_fields import LABEL
from backend.config import EngineConfig
from backend.errors import DatabaseError
from backend.metrics.live import LiveRun
from backend.metrics.stats import Phase
from backend.workload.spec import Workload
from db.models import RunRow
from tests.app.pages import DASHBOARD, page, press, tick, words
from tests.app.stored_runs import FakeServices, add_run, feed_start

VIEWS = ["Latency", "Over time", "All figures", "Requests", "Setup", "Name and notes"]


# History


def test_an_empty_history_says_what_fills_it(services: FakeServices) -> None:
    assert "No run yet" in words(page("history"))


def test_history_lists_filters_and_offers_nothing_before_a_tick(stored: FakeServices) -> None:
    app = page("history")
    assert list(app.dataframe[0].value["run"]) == ["#5", "#4", "#3", "#2", "#1"]
    assert all(button.disabled for button in app.button if button.label in ("Open", "Compare", "Delete"))
    assert list(page("history", text="blocks").dataframe[0].value["run"]) == ["#2"]
    assert list(page("history", status="failed").dataframe[0].value["run"]) == ["#3"]
    assert "No run matches" in words(page("history", text="no such thing"))


def test_history_names_and_deletes_the_ticked_runs(stored: FakeServices) -> None:
    app = page("history")
    tick(app, stored.repository.list(), 0)
    app.text_input[-1].set_value("renamed")
    press(app, "Save")
    assert stored.repository.get(5).label == "renamed"  # type: ignore[union-attr]
    tick(app, stored.repository.list(), 0, 2)
    press(app, "Delete")
    assert len(stored.repository.list()) == 5
    app.button(key="confirm-delete").click().run()
    assert [run.run_id for run in stored.repository.list()] == [4, 2, 1]
    assert not app.exception


def test_history_will_not_delete_a_run_that_goes_on(services: FakeServices) -> None:
    services.repository.create(EngineConfig().to_dict(), Workload().to_dict())
    app = page("history")
    tick(app, services.repository.list(), 0)
    press(app, "Delete")
    app.button(key="confirm-delete").click().run()
    assert "cancel it first" in words(app)
    assert len(services.repository.list()) == 1


def test_history_notices_that_a_run_lost_its_process(services: FakeServices) -> None:
    """Whoever started it: the dashboard was opened before that process ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    mine, lost = (services.repository.create(EngineConfig().to_dict(), Workload().to_dict()) for _ in range(2))
    with services.database.write() as session:
        session.execute(update(RunRow).where(RunRow.run_id == lost).values(owner_pid=process.pid))
    assert list(page("history").dataframe[0].value["status"]) == [["interrupted"], ["queued"]]
    assert services.repository.get(mine).status == "queued"  # type: ignore[union-attr]


# Detail


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_of_every_kind_of_run(stored: FakeServices, view: str) -> None:
    app = page("detail", view=view)
    for run_id in range(1, 6):
        app.query_params["run"] = str(run_id)
        app.run()
        assert not app.exception, app.exception[0].message
        assert app.title[0].value.startswith(f"Run \\#{run_id}")
        assert [tab.label for tab in app.tabs if tab.children] == [view]


def test_detail_shows_figures_beside_their_formulas(stored: FakeServices) -> None:
    app = page("detail", run="1", view="All figures")
    table = app.table[0].value
    output = table[table["Figure"] == "Output throughput"].iloc[0]
    assert (output["Value"], output["Formula"]) == (
        "80.0 tok/s",
        "Output tokens / duration; input tokens are not in it.",
    )


def test_detail_says_why_a_run_failed_or_was_lost(stored: FakeServices) -> None:
    assert "there is no model 'nowhere'" in words(page("detail", run="3"))


def test_rerun_starts_the_same_run_and_fills_the_form(stored: FakeServices) -> None:
    app = page("detail", run="2", view="Setup")  # of the address nothing stays behind
    press(app, "Re-run")
    asked = EngineConfig().with_overrides({"cache.block_size": 32})
    assert stored.fake_queue.submitted == [(6, asked, Workload())]
    assert app.title[0].value == "Run"
    assert app.selectbox(key=widgets.key_of("cache.block_size")).value == 32
    assert app.text_input(key=widgets.key_of(LABEL)).value == "larger blocks"


def test_detail_of_a_run_under_way(services: FakeServices) -> None:
    run_id = services.repository.create(EngineConfig().to_dict(), Workload().to_dict())
    assert "queued (process" in words(page("detail", run=str(run_id)))
    services.repository.record(
        run_id, {"status": "loading", "phase": asdict(Phase("pulling", 34e6, 98e6, "bytes"))}, {}
    )
    assert "pulling 34.0 MB of 98.0 MB (process" in words(page("detail", run=str(run_id)))
    live = services.fake_queue.live_run = LiveRun(run_id)
    feed_start(live, EngineConfig())
    assert "Cancel" in [button.label for button in page("detail", run=str(run_id)).button]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({}, "This page shows one run"),
        ({"run": "99"}, "no run #99"),
        ({"run": "x"}, "no run id"),
        ({"run": "-1"}, "no run id"),
    ],
)
def test_detail_without_a_run_it_can_show(stored: FakeServices, query: dict[str, str], said: str) -> None:
    assert said in words(page("detail", **query))


def test_the_sidebar_says_that_no_model_is_loaded_whatever_has_run(stored: FakeServices) -> None:
    assert "No model loaded; the next run loads one." in [it.value for it in page("history").sidebar.caption]


def test_the_sidebar_says_what_the_current_run_does_where_it_is_not_cut_off(services: FakeServices) -> None:
    """A link is cut off at the sidebar's width; a caption goes on in the next line."""
    run_id = services.repository.create(EngineConfig().to_dict(), Workload().to_dict())
    live = services.fake_queue.live_run = LiveRun(run_id)
    live.on_phase(Phase("int4 g32 zero point: choosing codes 42%, variants done", 5, 13))
    sidebar = page("history").sidebar
    assert [link.label for link in sidebar.get("page_link")][-1] == f"Run #{run_id}"
    captions = [caption.value.replace("\\", "") for caption in sidebar.caption]
    assert "int4 g32 zero point: choosing codes 42%, variants done 5 of 13" in captions


# Compare


def test_compare_needs_two_finished_runs(services: FakeServices) -> None:
    assert "there are none" in words(page("compare"))
    add_run(services)
    assert "there is one" in words(page("compare"))


def test_compare_shows_differences_against_the_baseline(stored: FakeServices) -> None:
    app = page("compare", runs="1,2")
    figures = app.dataframe[0].value.set_index("Figure")
    assert figures.loc["Output throughput", "#1 first (baseline)"] == "80.0 tok/s"
    assert figures.loc["Output throughput", "#2 larger blocks"] == "50.0 tok/s  (−37.5 %)"
    assert list(app.dataframe[1].value["Setting"]) == ["cache.block_size"]
    other = page("compare", runs="1,2", baseline="2").dataframe[0].value.set_index("Figure")
    assert other.loc["Output throughput", "#1 first"] == "80.0 tok/s  (+60.0 %)"


def test_compare_names_runs_with_failed_requests(stored: FakeServices) -> None:
    run_id = add_run(stored, num_failed=1)
    said = f"#{run_id}: 1 of 4 requests failed; its figures are of the rest"
    assert [item.value.replace("\\", "") for item in page("compare", runs=f"1,{run_id}").warning] == [said]
    assert not page("compare", runs="1,2").warning


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({}, "Choose at least two"),
        ({"runs": "1"}, "Choose at least two"),
        ({"runs": "1,99,x"}, "Not found: #99, x"),
        ({"runs": "1,3"}, "run #3 is failed"),
        ({"runs": "1,1,2", "baseline": "77"}, "Settings that differ"),
    ],
)
def test_compare_with_an_address_that_cannot_be_met(stored: FakeServices, query: dict[str, str], said: str) -> None:
    assert said in words(page("compare", **query))


# The frame


def test_a_database_that_cannot_be_opened_is_one_line_on_every_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign.db"
    foreign.write_text("not a database, and long enough to be read as one" * 10)
    monkeypatch.setenv("SERVELAB_DATABASE_URL", f"sqlite:///{foreign}")
    resources.install(None)
    app = AppTest.from_file(DASHBOARD, default_timeout=60).run()
    assert not app.exception
    assert len(app.error) == 1
    assert str(foreign) in words(app)


def test_a_database_that_fails_later_is_one_line_too(stored: FakeServices, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise DatabaseError("the database is locked: another program has been writing for over 10 s")

    for method in ("get", "list"):
        monkeypatch.setattr(stored.repository, method, fail)
    for name in ("run", "history", "compare"):
        assert "is locked" in words(page(name))
    assert "is locked" in words(page("detail", run="1"))


def test_pages_do_without_torch(stored: FakeServices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would now fail
    for name in ("run", "history", "detail", "compare"):
        page(name)
