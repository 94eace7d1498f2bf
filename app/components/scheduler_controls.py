"""What moves the Scheduler page through time: following a run that goes on, and the window that is shown."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app import formatting
from app.components.scheduler_charts import ZOOM
from app.components.scheduler_pick import FOLLOW, WINDOW, set_window
from app.components.scheduler_rows import Window
from app.components.scheduler_source import Source

_SLIDER, _UNIT, _KEPT_FOLLOW = "scheduler-slider", "scheduler-unit", "scheduler-follow-toggle"
_SHORTEST_S = 1e-3
_UNITS = ("seconds", "steps")


def follow() -> bool:
    """The switch of a run that goes on."""
    st.session_state[_KEPT_FOLLOW] = st.session_state.get(FOLLOW, True)
    st.toggle(
        "Follow",
        key=_KEPT_FOLLOW,
        on_change=_set_follow,
        help="Show what is stored so far, once a second. Off: the page stays as it is, and a window or a request can be chosen.",
    )
    return st.session_state[FOLLOW]


def window(first: Window, whole: Window, sources: Sequence[Source]) -> Window:
    """The stretch of time to show, and what changes it.

    Args:
        first: where the page begins.
        whole: what there is.
        sources: of one, steps can be chosen too.
    """
    shown = clamped(st.session_state.get(WINDOW) or first, whole)
    unit = "seconds"
    if len(sources) == 1:
        unit = st.session_state.get(_UNIT) or unit
    if unit == "steps":
        _step_slider(shown, sources[0])
    else:
        _time_slider(shown, whole)
    width = shown[1] - shown[0]
    moves = (
        ("Earlier", ":material/chevron_left:", (shown[0] - width / 2, shown[1] - width / 2), shown[0] <= whole[0]),
        ("Later", ":material/chevron_right:", (shown[0] + width / 2, shown[1] + width / 2), shown[1] >= whole[1]),
        ("Zoom in", ":material/zoom_in:", (shown[0] + width / 4, shown[1] - width / 4), width < 2 * _SHORTEST_S),
        ("Zoom out", ":material/zoom_out:", (shown[0] - width / 2, shown[1] + width / 2), shown == whole),
        ("Whole run", ":material/fit_width:", whole, shown == whole),
    )
    with st.container(horizontal=True, vertical_alignment="bottom"):
        for label, icon, target, disabled in moves:
            st.button(
                label,
                icon=icon,
                key=f"scheduler-{label}",
                on_click=set_window,
                args=(clamped(target, whole),),
                disabled=disabled,
            )
        if len(sources) == 1:
            st.segmented_control(
                "Window in", _UNITS, default="seconds", required=True, key=_UNIT, label_visibility="collapsed"
            )
    return shown


def zoom_to(key: str, whole: Window) -> None:
    """Take the stretch of time that was dragged over in the chart of this key."""
    dragged = st.session_state[key]["selection"].get(ZOOM) or {}
    if "x" in dragged:
        set_window(clamped(tuple(sorted(dragged["x"])), whole))


def clamped(wanted: Window, whole: Window) -> Window:
    """As long as what is wanted as far as there is so much, and within what there is."""
    width = max(wanted[1] - wanted[0], _SHORTEST_S)
    if width >= whole[1] - whole[0]:
        return whole
    if width == wanted[1] - wanted[0] and whole[0] <= wanted[0] and wanted[1] <= whole[1]:
        return wanted  # to the last bit
    begin = max(whole[0], min(wanted[0], whole[1] - width))
    return begin, min(begin + width, whole[1])


def _time_slider(shown: Window, whole: Window) -> None:
    st.session_state[_SLIDER] = shown
    st.slider(
        "Window, s",
        *whole,
        key=_SLIDER,
        step=(whole[1] - whole[0]) / 1000,
        format="%.2f",
        on_change=_take_times,
        help="Or drag over the tokens of the steps below.",
    )


def _step_slider(shown: Window, source: Source) -> None:
    steps = source.composition.steps
    inside = source.composition.steps_under_way(*shown)
    key = f"{_SLIDER}-steps"
    last = max(inside.start, inside.stop - 1)
    st.session_state[key] = (min(inside.start, steps[-1]), min(last, steps[-1]))
    st.slider(
        "Window, steps", steps[0], max(steps[-1], steps[0] + 1), key=key, on_change=_take_steps, args=(key, source)
    )


def _take_times() -> None:
    set_window(tuple(st.session_state[_SLIDER]))


def _take_steps(key: str, source: Source) -> None:
    first, last = st.session_state[key]
    composition = source.composition
    set_window((composition.start_of(first), composition.start_of(last + 1)))


def _set_follow() -> None:
    st.session_state[FOLLOW] = st.session_state[_KEPT_FOLLOW]
    set_window(None)


def describe(shown: Window, num_drawn: int, num_there: int) -> str:
    span = f"{formatting.duration(shown[1] - shown[0])} shown"
    if num_drawn < num_there:
        return (
            f"{span}. The first {formatting.count(num_drawn)} of {formatting.count(num_there)} requests in it are drawn: "
            "choose a shorter window to see the others."
        )
    return f"{span}, {formatting.count(num_there)} {'request' if num_there == 1 else 'requests'} in it."
