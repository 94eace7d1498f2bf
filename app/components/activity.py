"""What this process is running. Pages ask here and never remember it themselves: a reload shows the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import streamlit as st

from app import formatting
from app.components import notes
from backend.errors import ServeLabError
from backend.metrics.stats import FINAL_STATUSES

if TYPE_CHECKING:
    from backend.metrics.live import LiveSnapshot

T = TypeVar("T")


def is_active(snapshot: LiveSnapshot | None) -> TypeGuard[LiveSnapshot]:
    """Whether a run is under way."""
    return snapshot is not None and snapshot.status not in FINAL_STATUSES


def current_text(snapshot: LiveSnapshot) -> str:
    """What the run does now, or how it ended."""
    if not is_active(snapshot):
        return snapshot.status
    return formatting.phase_text(snapshot.phase)


def polled(read: Callable[[], T], active: Callable[[T], bool], body: Callable[[T], None], every_s: float) -> None:
    """Draw `body` of what `read` gives, again and again while it is `active`, and the whole page once when it ends.

    Nothing is polled while nothing runs: the page's last rerun defines the fragment anew, without a timer.
    """
    was_active = active(read())

    def draw() -> None:
        try:
            state = read()
            if was_active and not active(state):
                st.rerun()
            body(state)
        except ServeLabError as error:
            st.error(notes.plain(str(error)), icon=":material/error:")

    st.fragment(draw, run_every=every_s if was_active else None)()
