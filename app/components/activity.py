"""What this process is running. Pages ask here and never remember it themselves: a reload shows the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import streamlit as st

from app import formatting
from app.components import notes
from backend.errors import ServeLabError
from backend.metrics.stats import FINAL_STATUSES

if TYPE_CHECKING:
    from app.services import Services
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


def start_button(
    services: Services, name: str, *, key: str, why_queue: str, on_click: Callable[..., None], args: tuple[Any, ...]
) -> None:
    """What starts a form's run, or puts it behind the one under way.

    Args:
        why_queue: what a run waits for then, in a sentence.
        on_click: called with `args` before the page is drawn.
    """
    busy = is_active(services.queue.live())
    st.button(
        "Add to queue" if busy else name,
        type="primary",
        icon=":material/queue:" if busy else ":material/play_arrow:",
        key=key,
        help=why_queue if busy else None,
        on_click=on_click,
        args=args,
    )


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
