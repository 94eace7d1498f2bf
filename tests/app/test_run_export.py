"""The Export popover: which tables it offers for which runs."""

from __future__ import annotations

from tests.app.pages import page, tick
from tests.app.quantization_runs import add_quantization_run
from tests.app.speculation_runs import add_plain_run, add_speculation_run
from tests.app.stored_runs import FakeServices, add_run


def test_rounds_are_offered_where_a_run_speculated_and_first_on_their_page(services: FakeServices) -> None:
    run_id, _ = add_speculation_run(services)
    plain, _ = add_plain_run(services)
    app = page("speculation", run=str(run_id))
    contents = app.radio(key="export-table")
    assert [option.partition(",")[0] for option in contents.options] == [
        "rounds of drafts",
        "requests",
        "engine steps",
        "runs",
    ]
    assert contents.value == "rounds"
    assert app.get("download_button")
    app = page("detail", run=str(run_id))
    assert app.radio(key="export-table").value == "requests"
    assert "rounds of drafts, a row each" in app.radio(key="export-table").options
    app = page("detail", run=str(plain))
    assert "rounds of drafts, a row each" not in app.radio(key="export-table").options


def test_what_is_exported_is_what_runs_of_their_kind_have(services: FakeServices) -> None:
    """Of one kind its results first; of several, all; what was chosen stays as long as there is such a table."""

    def tables() -> list[str]:
        return [option.partition(",")[0] for option in app.radio(key="export-table").options]

    add_run(services)
    add_quantization_run(services)
    app = page("quantization")
    assert tables() == ["quantization results", "runs"]
    assert app.radio(key="export-table").value == "quantization"
    app = page("history")
    runs = services.repository.list()
    tick(app, runs, 0)
    assert (app.radio(key="export-table").value, len(tables())) == ("quantization", 2)
    tick(app, runs, 1)
    assert tables() == ["requests", "engine steps", "runs"]
    assert app.radio(key="export-table").value == "requests"
    app.radio(key="export-table").set_value("runs").run()
    tick(app, runs, 0, 1)
    assert tables() == ["quantization results", "runs", "requests", "engine steps"]
    assert app.radio(key="export-table").value == "runs"
