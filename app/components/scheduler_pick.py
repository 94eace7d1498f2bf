"""Which runs, request and window the Scheduler page shows: in the address and in the session."""

from __future__ import annotations

import math

import streamlit as st

from app.components import run_pick
from app.components.run_pick import run_name
from app.services import Services
from db.run_ids import parse_run_id
from db.run_rows import Run

RUN = "scheduler-run"
BESIDE = "scheduler-beside"  # a run on the same time axis; None: there is none
REQUEST = "scheduler-request"  # as `kv_cache_map.request_name` names it; None: none is looked into
WINDOW = "scheduler-window"  # (from, to) in seconds of the time axis; None: where the page begins
FOLLOW = "scheduler-follow"

_ADDRESS = "scheduler-address"
_NAMES = ("run", "beside", "request", "from", "to")
_WHAT = "with a schedule"


def pick(services: Services) -> list[Run]:
    """The run that the address names, by default the one that goes on, else the newest with a ledger; and the one beside."""
    runs = run_pick.listed(services)
    _follow_address(services, runs)
    if not runs:
        return []
    state = st.session_state
    with st.grid(2, min_column_width=280):
        chosen = run_pick.choose(runs, RUN, _begin_anew)
        others = sorted((run for run in runs.values() if run is not chosen), key=lambda run: _unlike(run, chosen))
        if state.get(BESIDE) == chosen.run_id:
            state[BESIDE] = None
        st.selectbox(
            "Beside",
            [run.run_id for run in others],
            index=None,
            format_func=lambda key: run_name(runs[key]) + ("" if _unlike(runs[key], chosen) else ", same workload"),
            key=BESIDE,
            placeholder="no other run",
            disabled=not others,
            on_change=_begin_anew,
            help="A second run below the first, on one time axis that begins with each run's first arrival.",
        )
    return [chosen] if state[BESIDE] is None else [chosen, runs[state[BESIDE]]]


def write_address(window: tuple[float, float] | None) -> None:
    """What is shown, so that it can be sent to somebody; `window` None where the page would begin there anyway."""
    state = st.session_state
    wanted = {"run": str(state[RUN])}
    for name, value in (("beside", state.get(BESIDE)), ("request", state.get(REQUEST))):
        if value is not None:
            wanted[name] = str(value)
    if window is not None:
        wanted |= {"from": f"{window[0]:.4f}", "to": f"{window[1]:.4f}"}
    state[_ADDRESS] = tuple(wanted.get(name, "") for name in _NAMES)
    if wanted != st.query_params.to_dict():
        st.query_params.from_dict(wanted)


def set_window(window: tuple[float, float] | None) -> None:
    st.session_state[WINDOW] = window


def _follow_address(services: Services, runs: dict[int, Run]) -> None:
    """Take what the address says when something else than the page changed it; see to it that the runs can be shown."""
    state = st.session_state
    address = tuple(st.query_params.get(name, "") for name in _NAMES)
    if address != state.get(_ADDRESS) or RUN not in state:
        asked = [parse_run_id(text) for text in address[:2]]
        for run_id, text in zip(asked, address, strict=False):
            run_pick.find(services, runs, run_id, text, _WHAT)
        state[RUN], state[BESIDE] = asked
        is_known = asked[0] in runs or not address[0]
        state[REQUEST] = address[2] or None if is_known else None
        state[WINDOW] = _window(address[3], address[4])
        state[FOLLOW] = state[WINDOW] is None
    else:  # they may be older than those that are listed, or deleted by now
        for key in (RUN, BESIDE):
            run_pick.find(services, runs, state.get(key), str(state.get(key) or ""), _WHAT)
        if state[RUN] not in runs:
            state[REQUEST] = state[BESIDE] = None
    if state.get(RUN) not in runs:
        state[RUN], state[WINDOW], state[FOLLOW] = run_pick.default_with_ledger(services, runs), None, True
    if state.get(BESIDE) not in runs:
        state[BESIDE] = None
    if not runs:
        del state[RUN]


def _window(begin: str, end: str) -> tuple[float, float] | None:
    try:
        window = float(begin), float(end)
    except ValueError:
        return None
    return window if all(map(math.isfinite, window)) and window[0] < window[1] else None


def _begin_anew() -> None:
    st.session_state[WINDOW], st.session_state[FOLLOW] = None, True


def _unlike(run: Run, other: Run) -> bool:
    """Sorts runs of the same workload before others."""
    return (run.model, run.workload) != (other.model, other.workload)
