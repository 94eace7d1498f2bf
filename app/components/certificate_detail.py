"""A certificate's run: the verdict, what it rests on, and what was asked."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.certificate_texts import figures
from app.components import activity, links, live_panel, notes, run_actions
from app.components.run_table import certificate_text
from app.services import Services, stored_verdict
from backend.errors import DatabaseError
from backend.metrics.stats import Phase
from db.run_rows import Run

_BADGES: dict[str, Any] = {"exact": "green", "rejected": "red", "inconclusive": "orange"}


def show(services: Services, run: Run) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.title(f"Run {notes.plain(run.title)}", anchor=False, width="content")
        notes.status_badge(run.status)
    created = formatting.timestamp(run.created_at)
    st.caption(notes.plain(f"{run.model}: {certificate_text(run.config)}. Created {created}."))
    links.history_link()
    if not run.is_final:
        activity.polled(
            lambda: services.repository.get(run.run_id),
            lambda now: now is not None and not now.is_final,
            _under_way,
            live_panel.POLL_S,
        )
        return
    notes.failure(run.status, run.error)
    notes.recording_error(services, run.run_id)
    _verdict(services, run)
    notes.show(run.notices)
    run_actions.label_and_notes(services, run)


def _under_way(run: Run | None) -> None:
    if run is None:
        st.error("This run has been deleted.")
        return
    st.info(notes.plain(formatting.phase_text(Phase(**run.phase)) if run.phase else run.status))


def _verdict(services: Services, run: Run) -> None:
    try:
        verdict = stored_verdict(services, run.run_id)
    except DatabaseError as error:
        st.error(notes.plain(str(error)))
        return
    if verdict is None:
        return
    st.badge(verdict.result, color=_BADGES[verdict.result])
    for reason in verdict.reasons:
        st.markdown(f"- {notes.plain(reason)}")
    st.table(pd.DataFrame(figures(verdict), columns=["Figure", "Value"]).set_index("Figure"))
