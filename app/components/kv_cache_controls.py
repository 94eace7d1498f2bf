"""What moves the KV cache page through a run: its steps, the time, and following a run that goes on."""

from __future__ import annotations

import streamlit as st

from app import formatting
from app.components.kv_cache_source import FOLLOW, STEP, Source

_SLIDER, _TIME, _KEPT_FOLLOW = "kv-slider", "kv-time", "kv-follow-toggle"
_TIME_DIGITS = 3


def follow() -> bool:
    """The switch of a run that goes on."""
    st.session_state[_KEPT_FOLLOW] = st.session_state.get(FOLLOW, True)
    st.toggle(
        "Follow",
        key=_KEPT_FOLLOW,
        on_change=_set_follow,
        help="Show the newest step that is stored, once a second. Off: the page stays at the step shown.",
    )
    return st.session_state[FOLLOW]


def step(source: Source) -> int:
    """The step to show, and what changes it."""
    steps = source.steps
    asked = st.session_state.get(STEP)
    if asked is not None and st.session_state.get(FOLLOW):  # until the run ended
        asked = steps[-1]
    number = source.clamp(source.first_shown if asked is None else asked)
    if len(steps) == 1:
        return number
    st.session_state[_SLIDER] = number
    end = source.times.end_of(number)
    st.session_state[_TIME] = None if end is None else round(end, _TIME_DIGITS)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.button(
            "Previous",
            icon=":material/chevron_left:",
            key="kv-previous",
            on_click=_go_to,
            args=(number - 1,),
            disabled=number == steps.start,
        )
        st.slider("Step", steps.start, steps[-1], key=_SLIDER, on_change=_take_slider)
        st.button(
            "Next",
            icon=":material/chevron_right:",
            key="kv-next",
            on_click=_go_to,
            args=(number + 1,),
            disabled=number == steps[-1],
        )
        st.number_input(
            "Time, s",
            value=None,
            step=0.1,
            format=f"%.{_TIME_DIGITS}f",
            key=_TIME,
            on_change=_take_time,
            args=(source,),
            width=150,
            help="When the step ended, in seconds since the run's start. Another time goes to the step under way then.",
        )
    return number


def describe(source: Source, number: int) -> str:
    end = source.times.end_of(number)
    when = "" if end is None else f", ended {formatting.duration(end)} after the start"
    return f"Step {formatting.count(number)} of {formatting.count(source.steps[-1])}{when}"


def _go_to(number: int) -> None:
    st.session_state[STEP], st.session_state[FOLLOW] = number, False


def _take_slider() -> None:
    _go_to(st.session_state[_SLIDER])


def _take_time(source: Source) -> None:
    time_s = st.session_state[_TIME]
    number = None if time_s is None else source.times.step_at(time_s)
    if number is not None:
        _go_to(source.clamp(number))


def _set_follow() -> None:
    """A run that is no longer followed stays at the step that was drawn last: `kv_cache_view` has kept it."""
    st.session_state[FOLLOW] = st.session_state[_KEPT_FOLLOW]
