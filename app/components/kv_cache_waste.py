"""Waste over a whole run on the KV cache page: one run's by itself, or two runs' on the same arrivals, one above the other."""

from __future__ import annotations

import streamlit as st

from app import formatting
from app.components import kv_cache_waste_source, links, notes, widgets
from app.components.bars import Share, share_bar
from app.components.kv_cache_source import BESIDE, MAX_POINTS
from app.components.kv_cache_waste_chart import height_of, parts_of, waste_chart
from app.components.kv_cache_waste_source import RunWaste, layout_of
from app.components.run_pick import run_name
from app.services import Services
from app.state import fill_form
from backend.analysis.kv_size import count_of
from backend.config import EngineConfig
from backend.errors import DatabaseError, ServeLabError
from backend.workload.spec import Workload
from db.run_rows import Run

_BOX = "kv-beside"  # the widget, whose value Streamlit forgets while another tab is open
_TIME_OF_TWO = "seconds since the first arrival"
_MEANING = (
    "Wasted: held slots (of a token each) that hold no token, or one behind the window. Shares are of all slots that were held, "
    "summed over the steps from the first arrival on, so that a step counts by what was held in it."
)


def show(services: Services, run: Run, number: int) -> None:
    """Args:
    number: of the step that is shown.
    """
    try:
        waste = _load(services, run)
    except DatabaseError as error:
        st.caption(notes.plain(f"What the run wasted cannot be told: {error}."))
        return
    if waste is None:
        return
    st.subheader("Waste over the run", anchor=False, help=_MEANING)
    beside = _pick(services, waste) if run.is_final else None
    other, problem = None, "its block events, or the times of its steps, are not known"
    try:
        other = None if beside is None else _load(services, beside)
    except DatabaseError as error:
        problem = str(error)
    if other is None or not (waste.times and other.times):
        if beside is not None:
            st.info(notes.plain(f"Run #{beside.run_id} cannot be shown beside: {problem}."))
        st.markdown(notes.plain(sentence(waste)))
        _one(waste, number)
    else:
        st.markdown(notes.plain(sentence(waste, other)))
        clauses = kv_cache_waste_source.differences(waste, other)
        if clauses:
            text = f"These runs were not asked the same, so they differ for that reason too: {'; '.join(clauses)}."
            st.warning(notes.plain(text), icon=":material/warning:")
        _two(waste, other, number)


def sentence(first: RunWaste, second: RunWaste | None = None) -> str:
    """What was wasted of all that was held, and how many requests it was held for. Plain text."""
    if second is None:
        totals = first.totals
        return (
            f"Over the run {formatting.percent(totals.wasted_share)} of the held KV slots were wasted; at most "
            f"{count_of(totals.most_requests, 'request')} held blocks at once."
        )
    names = [f"#{waste.run.run_id} ({layout_of(waste.run)})" for waste in (first, second)]
    shares = [formatting.percent(waste.totals.wasted_share) for waste in (first, second)]
    most = [formatting.count(waste.totals.most_requests) for waste in (first, second)]
    return (
        f"Of the KV slots held over the run {names[0]} wasted {shares[0]} and {names[1]} {shares[1]}; at most {most[0]} and "
        f"{most[1]} requests held blocks at once."
    )


def _load(services: Services, run: Run) -> RunWaste | None:
    with st.spinner(f"Adding up the steps of run #{run.run_id}"):  # appears for long ones only, and once
        return kv_cache_waste_source.load(services, run)


def _pick(services: Services, waste: RunWaste) -> Run | None:
    """The run beside: one with the same requests, or the one that the address names."""
    run, state = waste.run, st.session_state
    alike = kv_cache_waste_source.asked_the_same(services, waste)
    runs = {other.run_id: other for other in alike}
    asked = state.get(BESIDE)
    if asked == run.run_id:
        asked = None
    elif asked is not None and asked not in runs:
        named = services.repository.get(asked)
        if named is not None and named.is_final:
            runs[asked] = named
        else:
            asked = None
    state[BESIDE] = state[_BOX] = asked
    if runs:
        st.selectbox(
            "Beside",
            list(runs),
            index=None,
            format_func=lambda run_id: f"{run_name(runs[run_id])}, {_layout(runs[run_id])}",
            key=_BOX,
            placeholder="no other run",
            on_change=_take_beside,
            help="A second run with the same requests, on the same axes.",
        )
    if all(layout_of(other) == layout_of(run) for other in alike):
        _offer(run)
    return None if asked is None else runs[asked]


def _layout(run: Run) -> str:
    return layout_of(run) or run.status


def _take_beside() -> None:
    st.session_state[BESIDE] = st.session_state[_BOX]


def _offer(run: Run) -> None:
    """How to get a run with the other layout: there is none."""
    layout = "contiguous" if layout_of(run) == "paged" else "paged"
    if kv_cache_waste_source.arrivals_depend_on_speed(run):
        st.caption(
            "Requests of this workload wait for answers to others, so no run with another `cache.layout` has the same arrivals."
        )
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption("No stored run has the same requests and another `cache.layout`.", width="content")
        if st.button(
            f"Set up the same run, {layout}",
            icon=":material/tune:",
            key="kv-other-layout",
            help=f"The Run page with this run's settings and `cache.layout = {layout}`; it starts when you say so.",
        ):
            try:
                config = EngineConfig.from_dict(run.config).with_overrides({"cache.layout": layout})
                values = fill_form(config, Workload.from_dict(run.workload), f"{run.label or run.model}, {layout}")
            except ServeLabError as error:  # stored by a version that knew other settings
                st.error(notes.plain(str(error)), icon=":material/error:")
            else:
                widgets.fill(values)
                st.switch_page(links.RUN, query_params={})


def _one(waste: RunWaste, number: int) -> None:
    points, steps = waste.history.thinned(MAX_POINTS), waste.history.steps
    x = [*(float(point.step) for point in points), float(steps.stop)]
    _legend(waste)
    title = "KV slots over the run"
    st.vega_lite_chart(*waste_chart(points, x, (x[0], x[-1]), height_of(points), number + 0.5, title, "step"))


def _two(first: RunWaste, second: RunWaste, number: int) -> None:
    drawn = []
    for waste in (first, second):
        points = waste.history.thinned(MAX_POINTS, waste.first_step)
        starts = waste.starts_of([*(point.step for point in points), waste.history.steps.stop])
        drawn.append((points, [start - waste.first_arrival for start in starts]))
    y_end = max(height_of(points) for points, _ in drawn)
    x_axis = (0.0, max(x[-1] for _, x in drawn))
    middle = sum(first.starts_of([number, number + 1])) / 2 - first.first_arrival
    for waste, (points, x) in zip((first, second), drawn, strict=True):
        mark = middle if waste is first and number >= first.first_step else None
        title = f"KV slots of #{waste.run.run_id}, {layout_of(waste.run)}"
        _legend(waste, f"#{waste.run.run_id}: ")
        st.vega_lite_chart(*waste_chart(points, x, x_axis, y_end, mark, title, _TIME_OF_TWO))
    links.scheduler_link(first.run.run_id, "Both schedules", beside=second.run.run_id)


def _legend(waste: RunWaste, name: str = "") -> None:
    """Of the picture below, with what each colour adds up to."""
    totals = waste.totals
    whole = totals.num_slots + totals.num_unusable_slots
    shares = [
        Share(label, slots, formatting.percent(slots / whole), colour) for label, slots, colour in parts_of(totals)
    ]
    saved = f"sharing saved {formatting.percent(totals.saved_share)}, dashed" if totals.num_saved_slots else ""
    what = "slots in held blocks and unusable ones" if totals.num_unusable_slots else "slots in held blocks"
    title = f"{name}{what}, summed over the steps"
    share_bar(title[0].upper() + title[1:], shares, saved)
