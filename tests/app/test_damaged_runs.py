"""KV cache and Scheduler pages of runs whose records are damaged, or gone: in words, with what can be shown."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from streamlit.testing.v1 import AppTest

from tests.app.kv_runs import NUM_STEPS, add_kv_run
from tests.app.pages import page, words
from tests.app.schedule_runs import add_schedule_run
from tests.app.stored_runs import FakeServices

SECOND, FIRST = "first_step = 16", "first_step = 0"


def change(services: FakeServices, statement: str, **values: Any) -> None:
    with services.database.write() as session:
        session.execute(text(statement), values)


def figures(app: AppTest) -> set[str]:
    return {metric.label for metric in app.metric}


def shows_blocks(app: AppTest) -> bool:
    return bool(app.get("bidi_component"))


def rerun(app: AppTest) -> None:
    app.run()
    assert not app.exception, app.exception[0].message


@pytest.mark.parametrize("step", [20, 38])
def test_blocks_before_a_gap_are_shown_and_the_gap_is_named(services: FakeServices, step: int) -> None:
    """The second of the chunks that end at steps 15, 31, 36 and 39."""
    run_id, made = add_kv_run(services)
    change(services, f"DELETE FROM chunks WHERE {SECOND}")
    app = page("kv_cache", run=str(run_id), step="10")
    assert shows_blocks(app)
    assert f"step ledger of run #{run_id} is damaged: steps 16 to 31 are missing" in words(app)
    assert "What the run wasted cannot be told" in words(app)
    app.slider(key="kv-slider").set_value(step).run()
    assert not app.exception
    assert not shows_blocks(app)
    assert f"The blocks in step {step} cannot be shown: the step ledger is damaged: steps 16 to 31" in words(app)
    app.slider(key="kv-slider").set_value(15).run()
    assert shows_blocks(app)
    assert len(made.steps) == NUM_STEPS


def test_a_ledger_without_its_beginning_is_not_taken_for_an_old_one(services: FakeServices) -> None:
    run_id, _ = add_kv_run(services)
    change(services, f"DELETE FROM chunks WHERE {FIRST}")
    app = page("kv_cache", run=str(run_id), step="20")
    assert "steps 0 to 15 are missing" in words(app)
    assert "before it held block events" not in words(app)


DAMAGE = [
    (f"UPDATE chunks SET data = :data WHERE {SECOND}", {"data": "text"}),
    (f"UPDATE chunks SET first_step = 9 WHERE {SECOND}", {}),
    (f"UPDATE chunks SET last_step = 30 WHERE {SECOND}", {}),
    (
        "INSERT INTO chunks (run_id, kind, first_step, last_step, data) "
        f"SELECT run_id, kind, first_step, last_step, data FROM chunks WHERE {SECOND}",
        {},
    ),
]


@pytest.mark.parametrize(("statement", "values"), DAMAGE, ids=range(len(DAMAGE)))
@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("kv_cache", {"run": "1", "step": "39"}),
        ("kv_cache", {"run": "1", "view": "Prefix cache", "request": "2"}),
    ],
    ids=["last", "prefix"],
)
def test_damage_on_the_kv_cache_page(
    services: FakeServices, name: str, query: dict[str, str], statement: str, values: dict[str, Any]
) -> None:
    assert add_kv_run(services)[0] == 1
    change(services, statement, **values)
    told = words(page(name, **query))
    assert "damaged" in told or "cannot be told" in told


@pytest.mark.parametrize("name", ["kv_cache", "scheduler"])
@pytest.mark.parametrize("damage", [f"DELETE FROM chunks WHERE run_id = 1 AND {SECOND}", "UPDATE runs SET load = '[]'"])
def test_a_damaged_run_beside(services: FakeServices, name: str, damage: str) -> None:
    add_kv_run(services)
    run_id, _ = add_kv_run(services)
    change(services, f"{damage} WHERE run_id = 1" if "UPDATE" in damage else damage)
    app = page(name, run=str(run_id), **{"kv_cache": {"with": "1"}, "scheduler": {"beside": "1"}}[name])
    if name == "kv_cache":
        assert shows_blocks(app)
        assert "Run #1 cannot be shown beside: " in words(app)
    elif "chunks" in damage:
        assert "Of run #1 steps up to 15 are shown, and none behind them: the step ledger is damaged" in words(app)


@pytest.mark.parametrize("missing", ["chunk", "times"])
def test_a_schedule_with_a_gap_says_where_it_ends(services: FakeServices, missing: str) -> None:
    run_id, _ = add_kv_run(services)
    if missing == "chunk":
        change(services, f"DELETE FROM chunks WHERE {SECOND}")
    else:
        change(services, "UPDATE steps SET end_time = NULL WHERE step = 16")
    app = page("scheduler", run=str(run_id))
    why = "steps 16 to 31 are missing" if missing == "chunk" else "the time of step 16 is not known"
    assert f"Of run #{run_id} steps up to 15 are shown, and none behind them: " in words(app)
    assert why in words(app)
    assert "Idle slots" in figures(app)


def test_a_whole_schedule_warns_of_nothing(services: FakeServices) -> None:
    run_id, _ = add_schedule_run(services)
    assert not page("scheduler", run=str(run_id)).warning


@pytest.mark.parametrize("name", ["kv_cache", "scheduler"])
def test_steps_without_times(services: FakeServices, name: str) -> None:
    run_id, _ = add_kv_run(services)
    change(services, "UPDATE steps SET end_time = NULL, duration_ms = NULL")
    app = page(name, run=str(run_id))
    if name == "kv_cache":
        assert shows_blocks(app)
        assert "ended" not in words(app).split("Step ")[1].splitlines()[0]
    else:
        assert f"The schedule of run #{run_id} cannot be shown: the time of step 0 is not known" in words(app)


@pytest.mark.parametrize("settings", ['{"cache":3}', "[1]", '{"cache":{"block_size":0}}'])
def test_settings_that_are_not_what_they_should_be(services: FakeServices, settings: str) -> None:
    add_kv_run(services)
    add_kv_run(services)
    change(services, "UPDATE runs SET resolved_config = :settings WHERE run_id = 1", settings=settings)
    for query in ({"run": "1"}, {"run": "1", "view": "Prefix cache"}):
        assert "its stored settings are damaged: cache.block_size is not there" in words(page("kv_cache", **query))
    page("kv_cache", run="2", **{"with": "1"})
    assert "its stored settings are damaged" in words(page("scheduler", run="1"))
    page("scheduler", run="2", beside="1")


@pytest.mark.parametrize("step", ["9" * 5000, "٤"])
def test_a_step_that_does_not_fit(services: FakeServices, step: str) -> None:
    run_id, _ = add_kv_run(services)
    app = page("kv_cache", run=str(run_id), step=step)
    assert shows_blocks(app)
    assert app.query_params["step"] == page("kv_cache", run=str(run_id)).query_params["step"]


@pytest.mark.parametrize("name", ["kv_cache", "scheduler", "detail", "kernels", "compare"])
def test_numbers_of_thousands_of_digits(services: FakeServices, name: str) -> None:
    add_kv_run(services)
    add_kv_run(services)
    digits = "9" * 5000
    page(name, run=digits, runs=digits, baseline=digits, beside=digits, request=digits)
    page(name, run="1", step=digits, beside=digits, **{"from": digits, "to": digits, "with": digits})


def test_a_run_is_not_shown_beside_itself(services: FakeServices) -> None:
    run_id, _ = add_kv_run(services)
    app = page("kv_cache", run=str(run_id), **{"with": str(run_id)})
    assert "with" not in app.query_params
    assert not app.warning


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("kv_cache", {}),
        ("kv_cache", {"step": "20"}),
        ("kv_cache", {"view": "Prefix cache", "request": "3"}),
        ("scheduler", {"request": "3"}),
    ],
)
def test_a_run_that_is_deleted_while_it_is_shown_is_named(
    services: FakeServices, name: str, query: dict[str, str]
) -> None:
    first, _ = add_kv_run(services)
    second, _ = add_kv_run(services)
    app = page(name, run=str(first), **query)
    services.repository.delete([first])
    rerun(app)
    assert f"There is no run {first} with a" in words(app)
    assert "It may have been deleted" in words(app)
    assert app.query_params["run"] == str(second)
    assert "request" not in app.query_params
    assert "There is no request" not in words(app)
    rerun(app)
    assert not app.warning


@pytest.mark.parametrize(("name", "beside"), [("kv_cache", "with"), ("scheduler", "beside")])
def test_a_run_beside_that_is_deleted_is_named(services: FakeServices, name: str, beside: str) -> None:
    first, _ = add_kv_run(services)
    second, _ = add_kv_run(services)
    app = page(name, run=str(second), **{beside: str(first)})
    assert app.query_params[beside] == str(first)
    services.repository.delete([first])
    rerun(app)
    assert f"There is no run {first}" in words(app)
    assert app.query_params["run"] == str(second)
    rerun(app)
    assert beside not in app.query_params
    assert not app.warning
