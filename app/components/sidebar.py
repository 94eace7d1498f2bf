"""What spans all pages: the engine, the run under way, the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from app import formatting
from app.components import activity, links, notes
from app.services import Services
from backend.metrics.environment import environment

if TYPE_CHECKING:
    from backend.engine.engine_host import EngineHost
    from backend.metrics.live import LiveSnapshot

POLL_S = 2.0

_ENGINE_BADGES: dict[str, Any] = {"ready": "green", "loading": "orange", "failed": "red"}


def show(services: Services) -> None:
    with st.sidebar:
        activity.polled(services.queue.live, activity.is_active, lambda snapshot: _status(services, snapshot), POLL_S)
        st.space("small")
        _machine()


def _status(services: Services, snapshot: LiveSnapshot | None) -> None:
    host = services.host
    with st.container(gap="xsmall"):
        st.caption("Engine")
        st.badge("no model" if host.state == "empty" else host.state, color=_ENGINE_BADGES.get(host.state, "gray"))
        st.caption(_loaded(host))
    with st.container(gap="xsmall"):
        st.caption("Current run")
        if activity.is_active(snapshot):
            links.detail_link(snapshot.run_id, f"Run #{snapshot.run_id}")
            # Not in the link, whose text is cut off at the sidebar's width.
            st.caption(notes.plain(activity.current_text(snapshot)))
        else:
            st.caption("None. The next one starts on the Run page.")


def _loaded(host: EngineHost) -> str:
    info = host.info
    if info is None:
        return "No model loaded; the next run loads one."
    config = info.resolved_config.model
    return f"{config.name}, {config.dtype} on {config.device.upper()}"


def _machine() -> None:
    machine = environment()
    with st.container(gap="xsmall"):
        st.caption("Machine")
        card = machine.get("gpu")
        if card:
            st.caption(f"{card}, {formatting.memory(machine.get('gpu_memory_bytes'))}")
        else:
            st.caption("No GPU: models run on the CPU.")
        cores = formatting.quantity(machine.get("usable_cores"), "cores")
        st.caption(f"{machine.get('cpu') or 'CPU'}, {cores}, {formatting.memory(machine.get('ram_bytes'))}")
        st.caption(f"Host {machine.get('host') or formatting.NONE}")
