"""The Scheduler page below its runs: what each request did over time, and of what each step was made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import streamlit as st

from app import formatting
from app.components import (
    links,
    notes,
    palette,
    scheduler_charts,
    scheduler_controls,
    scheduler_pair,
    scheduler_pick,
    scheduler_request,
)
from app.components.activity import polled
from app.components.bars import Share, share_bar
from app.components.kv_cache_map import request_name
from app.components.live_panel import POLL_S
from app.components.scheduler_pick import REQUEST
from app.components.scheduler_rows import MAX_BARS, MAX_STEP_BARS, Window, gantt_rows, step_rows, visible
from app.components.scheduler_source import Source, first_window, load
from app.services import Services
from backend.errors import DatabaseError
from backend.metrics.request_timeline import SPAN_KINDS, RequestTimeline
from db.run_rows import Run

_MAX_ROWS = 400  # requests of one picture: more lines than it has pixels for
_LIVE_ROWS = (
    10,
    40,
)  # for which there is room while a run goes on: a picture that grew with each request would flicker
_TIME = "seconds since start"
_TIME_OF_TWO = "seconds since the first arrival"
_EXPLANATION = """
A step is one pass of the model over the tokens that the scheduler has chosen: chunks of prompts (prefill) and one token of
each answer under way (decode). With continuous batching a request joins the running ones as soon as a slot and blocks are
free; a static batch is filled once and runs until its longest member has ended, with slots idle meanwhile. A long prompt in
one piece makes every decode beside it wait for a long step; in chunks under a token budget it spreads over several. When the
pool is full, a request is preempted, and what it had computed is computed again later. All of it is read from the run's own
step ledger and step times: nothing here is simulated. A step's time grows with its tokens, so that

$$\\text{gap between two tokens} = t_{\\text{step}}(\\text{prefill tokens} + \\text{decode tokens})$$

Yu et al. 2022, *Orca: A Distributed Serving System for Transformer-Based Generative Models*; Agrawal et al. 2024, *Taming
Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*.
"""


def show(services: Services, runs: Sequence[Run]) -> None:
    if not all(run.is_final for run in runs) and scheduler_controls.follow():
        scheduler_pick.write_address(None)
        polled(
            lambda: [services.repository.get(run.run_id) for run in runs],
            lambda now: any(run is not None and not run.is_final for run in now),
            lambda now: _runs(services, now, follows=True),
            POLL_S,
        )
    else:
        _runs(services, runs, follows=False)


def explanation() -> None:
    with st.expander("What am I looking at?", icon=":material/help:"):
        st.markdown(_EXPLANATION)


def _runs(services: Services, runs: Sequence[Run | None], *, follows: bool) -> None:
    sources = []
    for run in runs:
        try:
            source = None if run is None else load(services, run)
        except DatabaseError as error:
            text = f"The schedule of run #{run.run_id if run else 0} cannot be shown: {error}."
            st.error(notes.plain(text), icon=":material/broken_image:")
            continue
        if source is not None:
            sources.append(source)
            if source.problem is not None:
                _cut_short(source, source.problem)
        elif run is None:
            st.error("This run has been deleted.")
        else:
            _nothing(run)
    if not sources:
        if not follows:
            scheduler_pick.write_address(st.session_state.get(scheduler_pick.WINDOW))
        return
    scheduler_pair.show(sources)
    zeros = [source.first_arrival if len(sources) > 1 else 0.0 for source in sources]
    first = first_window(sources, zeros, newest=follows)
    if follows:
        shown = whole = first
    else:
        whole = (
            min(source.lines[0].start - zero for source, zero in zip(sources, zeros, strict=True)),
            max(source.end - zero for source, zero in zip(sources, zeros, strict=True)),
        )
        shown = scheduler_controls.window(first, whole, sources)
        scheduler_pick.write_address(None if shown == first else shown)
    for source, zero in zip(sources, zeros, strict=True):
        _schedule(source, zero, shown, whole, one_of=len(sources), interactive=not follows)
    scheduler_request.show(services, sources, choose=not follows)
    _raw(sources)


def _cut_short(source: Source, problem: str) -> None:
    last = source.composition.steps[-1]
    text = f"Of run #{source.run.run_id} steps up to {last:,} are shown, and none behind them: {problem}."
    st.warning(notes.plain(text), icon=":material/warning:")


def _nothing(run: Run) -> None:
    if run.is_final:
        st.info(f"Run #{run.run_id} has no step ledger, so there is no schedule to show.", icon=":material/grid_off:")
    else:
        st.info(
            f"Run #{run.run_id} is {run.status}; its schedule appears here with its first steps.",
            icon=":material/hourglass_empty:",
        )


def _schedule(source: Source, zero: float, shown: Window, whole: Window, *, one_of: int, interactive: bool) -> None:
    """One run's requests and steps in the window, which is on the time axis that begins at `zero` of the run's time."""
    window = (shown[0] + zero, shown[1] + zero)
    there = visible(source.lines, window)
    drawn = there[:_MAX_ROWS]
    name = source.run.title
    if one_of > 1:
        st.subheader(notes.plain(name), anchor=False)
    _where_time_goes(there, window)
    st.caption(scheduler_controls.describe(shown, len(drawn), len(there)))
    x_title = _TIME if one_of == 1 else _TIME_OF_TWO
    names = {line.request_id: request_name(line.request_id) for line in drawn}
    chosen = source.by_name.get(st.session_state.get(REQUEST) or "")
    rows = gantt_rows(
        drawn,
        names,
        window,
        zero=zero,
        chosen=None if chosen is None else chosen.request_id,
        max_bars=MAX_BARS // one_of,
    )
    place = f"{source.run.run_id}-{shown[0]:.6f}-{shown[1]:.6f}"  # a selection belongs to what it was made on
    gantt = scheduler_charts.gantt(
        rows,
        "Requests, click one to look into it" if interactive else "Requests",
        "",
        height=scheduler_charts.gantt_height(len(drawn) if interactive else _LIVE_ROWS[len(drawn) > _LIVE_ROWS[0]]),
        pick=interactive,
    )
    with st.container(key=f"scheduler-gantt-{source.run.run_id}"):
        if interactive:
            key = f"scheduler-gantt-{place}"
            st.vega_lite_chart(*gantt, key=key, on_select=partial(_pick, key), selection_mode=scheduler_charts.PICK)
        else:
            st.vega_lite_chart(*gantt)
    buckets = source.composition.buckets(source.composition.steps_under_way(*window), MAX_STEP_BARS)
    size = max((bucket.end_step - bucket.first_step for bucket in buckets), default=1)
    each = f", mean of {size} steps a bar" if size > 1 else ""
    steps = step_rows(buckets, window, zero=zero)
    title = f"Tokens per step{each}" + (", drag to zoom" if interactive else "")
    tokens = scheduler_charts.step_tokens(steps, title, "", zoom=interactive)
    with st.container(key=f"scheduler-tokens-{source.run.run_id}"):
        if interactive:
            key = f"scheduler-tokens-{place}"
            st.vega_lite_chart(
                *tokens,
                key=key,
                on_select=partial(scheduler_controls.zoom_to, key, whole),
                selection_mode=scheduler_charts.ZOOM,
            )
        else:
            st.vega_lite_chart(*tokens)
    longest = f", longest of {size} a bar" if size > 1 else ""
    st.vega_lite_chart(*scheduler_charts.step_time(steps, f"Step time{longest}", x_title))


def _where_time_goes(lines: Sequence[RequestTimeline], window: Window) -> None:
    """The legend of the picture below, with what each colour adds up to."""
    seconds = dict.fromkeys(SPAN_KINDS, 0.0)
    for line in lines:
        for span in line.spans:
            seconds[span.kind] += max(0.0, min(span.end, window[1]) - max(span.start, window[0]))
    total = sum(seconds.values())
    shares = [
        Share(kind, amount, formatting.percent(amount / total), palette.SPANS[kind])
        for kind, amount in seconds.items()
        if amount
    ]
    share_bar("What the requests' time went by with", shares, f"{formatting.duration(total)} in all")


def _pick(key: str) -> None:
    """The request whose bar was clicked."""
    picked = st.session_state[key]["selection"].get(scheduler_charts.PICK) or []
    if picked and picked[0].get("request_id"):
        st.session_state[REQUEST] = request_name(picked[0]["request_id"])


def _raw(sources: Sequence[Source]) -> None:
    with st.expander("Raw data", icon=":material/data_object:"):
        st.caption("Every step as JSON, with who ran and what became of each KV block:")
        for source in sources:
            st.code(f"servelab runs ledger {source.run.run_id}", language="shell")
        for source in sources:
            links.detail_link(source.run.run_id)
            links.kv_cache_link(source.run.run_id, f"KV blocks of #{source.run.run_id}")
