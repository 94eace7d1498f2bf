"""Words about a run: its status, why it failed and what helps, and what the engine decided otherwise than asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import streamlit as st

from app.services import Services

_BADGES: dict[str, tuple[Any, str]] = {
    "queued": ("gray", ":material/hourglass_empty:"),
    "loading": ("blue", ":material/downloading:"),
    "running": ("blue", ":material/play_circle:"),
    "finished": ("green", ":material/check_circle:"),
    "failed": ("red", ":material/error:"),
    "cancelled": ("gray", ":material/cancel:"),
    "interrupted": ("orange", ":material/power_off:"),
}


def status_badge(status: str) -> None:
    colour, icon = _BADGES[status]
    st.badge(status, color=colour, icon=icon)


def failure(status: str, error: str | None) -> None:
    """Why a run did not finish, with the remedy its error names; nothing for one that did."""
    match status:
        case "failed":
            st.error(plain(error or "The run failed and left no reason."), icon=":material/error:")
        case "interrupted":
            st.warning(
                f"{plain(error or 'The process that ran it ended')}. What it had recorded is kept; run it again to finish it.",
                icon=":material/power_off:",
            )
        case "cancelled" if error:
            st.info(plain(error), icon=":material/cancel:")


def recording_error(services: Services, run_id: int) -> None:
    """Records that did not reach the database."""
    error = services.recording_error(run_id)
    if error:
        st.warning(f"Records of this run are missing: {plain(error)}", icon=":material/database_off:")


def show(notices: Sequence[str]) -> None:
    for notice in notices:
        st.caption(f":material/info: {plain(notice)}")


def plain(text: str) -> str:
    """Foreign text for a place that reads Markdown: shown as it is."""
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|~$:<>])", r"\\\1", text)
