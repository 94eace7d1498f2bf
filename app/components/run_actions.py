"""What can be done with stored runs: open, compare, run again, export, delete, name."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app.components import links, notes, widgets
from app.components.speculation_pick import method_of
from app.run_export import export_stored_runs
from app.services import Services, start_run
from app.state import address_of, fill_form
from backend.config import EngineConfig
from backend.errors import ServeLabError
from backend.workload.spec import Workload
from db.export import Format, Table
from db.run_rows import Run, RunKind

_ERROR = "action error"
_MIMES: dict[Format, str] = {"json": "application/json", "csv": "text/csv"}
_TABLES: dict[Table, str] = {
    "requests": "requests, a row each",
    "steps": "engine steps, a row each",
    "rounds": "rounds of drafts, a row each",
    "runs": "runs, a row each",
    "kernels": "kernel results, a row each",
    "quantization": "quantization results, a row each",
}
_OF_KIND: dict[RunKind, tuple[Table, ...]] = {
    "serve": ("requests", "steps", "rounds", "runs"),
    "kernels": ("kernels", "runs"),
    "quantization": ("quantization", "runs"),
    "certificate": ("runs",),
}
_EXPORTED = "export-table"


def show(services: Services, runs: Sequence[Run]) -> None:
    """Buttons for the ticked runs."""
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Open", icon=":material/query_stats:", disabled=len(runs) != 1, help="Tick one run."):
            st.switch_page(links.DETAIL, query_params={"run": str(runs[0].run_id)})
        kinds = {run.kind for run in runs}
        if st.button(
            "Compare",
            icon=":material/compare_arrows:",
            disabled=len(runs) < 2 or len(kinds) > 1,
            help="Tick two runs or more of one kind: workloads, kernel runs, or quantization runs.",
        ):
            ids = sorted(run.run_id for run in runs)  # the older run is the baseline
            if lab := links.lab_place(runs[0]):
                st.switch_page(lab[0], query_params={"run": str(ids[-1]), "with": address_of(ids[:-1])})
            st.switch_page(links.COMPARE, query_params={"runs": address_of(ids)})
        export(services, runs)
        if st.button("Delete", icon=":material/delete:", disabled=not runs, help="Asks before it deletes."):
            _confirm_delete(services, runs)
        if runs:
            st.caption(f"{len(runs)} ticked", width="content")
    if error := st.session_state.pop(_ERROR, None):
        st.error(notes.plain(error), icon=":material/error:")


def export(services: Services, runs: Sequence[Run], first: Table | None = None) -> None:
    """A popover that writes the runs to a file.

    Args:
        first: what is offered before the other tables.
    """
    ids = [run.run_id for run in runs]
    formats = list(_MIMES)
    tables: list[Table] = list(dict.fromkeys(table for run in runs for table in _tables_of(run))) or list(_TABLES)
    tables.sort(key=lambda table: table != first)
    if st.session_state.get(_EXPORTED) not in tables:
        st.session_state[_EXPORTED] = tables[0]
    with st.popover("Export", icon=":material/download:", disabled=not runs):
        file_format = st.radio("Format", formats, format_func=str.upper, horizontal=True, key="export-format")
        table = st.radio("Content", tables, format_func=lambda name: _TABLES[name], key=_EXPORTED)
        st.download_button(
            "Download",
            data=lambda: export_stored_runs(services, ids, file_format, table),
            file_name=f"servelab-{'-'.join(map(str, ids[:5]))}-{table}.{file_format}",
            mime=_MIMES[file_format],
            icon=":material/download:",
            key="export-download",
            on_click="ignore",
            disabled=not runs,
        )


def _tables_of(run: Run) -> tuple[Table, ...]:
    tables = _OF_KIND[run.kind]
    return tables if method_of(run) is not None else tuple(table for table in tables if table != "rounds")


def label_and_notes(services: Services, run: Run) -> None:
    """A small form that names a run."""
    with st.form(f"naming-{run.run_id}"):
        label = st.text_input("Label", value=run.label or "", placeholder="what sets this run apart")
        text = st.text_area("Notes", value=run.notes or "", height=80, placeholder="what was learned")
        if st.form_submit_button("Save", icon=":material/save:"):
            try:
                services.repository.set_label(run.run_id, label.strip() or None)
                services.repository.set_notes(run.run_id, text.strip() or None)
            except ServeLabError as error:
                st.error(notes.plain(str(error)))
            else:
                st.toast(f"Saved #{run.run_id}.")
                st.rerun()


def rerun_button(services: Services, run: Run) -> None:
    """Start the same config and workload as a new run, and put both on the form."""
    if st.button("Re-run", icon=":material/replay:", key="re-run", help="A new run with the same config and workload."):
        try:
            config, workload = EngineConfig.from_dict(run.config), Workload.from_dict(run.workload)
            start_run(services, config, workload, run.label)
        except ServeLabError as error:
            st.error(notes.plain(str(error)), icon=":material/error:")
        else:
            widgets.fill(fill_form(config, workload, run.label))
            st.switch_page(links.RUN, query_params={})  # else it refuses to leave the name of the view behind


@st.dialog("Delete runs?")
def _confirm_delete(services: Services, runs: Sequence[Run]) -> None:
    st.markdown("With all their records, for good:")
    st.markdown("\n".join(f"- {notes.plain(run.title)}, {run.status}" for run in runs))
    with st.container(horizontal=True):
        ids = [run.run_id for run in runs]
        deleted = st.button(
            "Delete",
            type="primary",
            icon=":material/delete:",
            key="confirm-delete",
            on_click=_delete,
            args=(services, ids),
        )
        if st.button("Keep", key="keep") or deleted:
            st.rerun()


def _delete(services: Services, run_ids: Sequence[int]) -> None:
    try:
        services.repository.delete(run_ids)
    except ServeLabError as error:
        st.session_state[_ERROR] = str(error)
