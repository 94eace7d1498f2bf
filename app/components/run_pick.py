"""The run of a workload that a page shows: which can be chosen, which one where none is named, and the box to choose in."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from app.components import activity, notes
from app.components.run_table import workload_text
from app.services import Services
from backend.metrics.ledger import LEDGER_KIND
from db.run_rows import Run

MAX_LISTED = 200


def listed(services: Services) -> dict[int, Run]:
    """The newest runs by id, newest first. `find` adds older ones that are asked for."""
    return {run.run_id: run for run in services.repository.list(kind="serve", limit=MAX_LISTED)}


def find(services: Services, runs: dict[int, Run], run_id: int | None, name: str, what: str) -> bool:
    """See to it that a run is among `runs`, and tell whether it is; the page says so when one is named that there is not.

    Args:
        name: as it was asked for; empty where none was.
        what: what such a run is or has: "with a schedule".
    """
    run = services.repository.get(run_id) if run_id is not None and run_id not in runs else None
    if run is not None and run.kind == "serve":
        runs[run.run_id] = run
    if name and run_id not in runs:
        st.warning(notes.plain(f"There is no run {name} {what}. It may have been deleted."))
    return run_id in runs


def default(services: Services, runs: dict[int, Run], is_wanted: Callable[[Run], bool]) -> int | None:
    """The run that goes on, else the newest that is wanted, else the newest; None without any."""
    snapshot = services.queue.live()
    if activity.is_active(snapshot) and snapshot.run_id in runs:
        return snapshot.run_id
    return next((run_id for run_id, run in runs.items() if is_wanted(run)), next(iter(runs), None))


def default_with_ledger(services: Services, runs: dict[int, Run]) -> int | None:
    """`default` for a page that is drawn from the ledger of steps."""
    return default(services, runs, lambda run: bool(services.repository.chunks(run.run_id, LEDGER_KIND)))


def run_name(run: Run) -> str:
    """Of what does not change while the run goes on: the browser keeps the name that it has shown."""
    return f"{run.title}: {run.model}, {workload_text(run.workload)}"


def choose(
    runs: dict[int, Run], key: str, on_change: Callable[[], None], name_of: Callable[[Run], str] = run_name
) -> Run:
    """The box; `key` of the session holds the id of one of the runs."""
    st.selectbox("Run", list(runs), format_func=lambda run_id: name_of(runs[run_id]), key=key, on_change=on_change)
    return runs[st.session_state[key]]
