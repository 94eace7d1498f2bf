"""A run while it goes on, at one look a second, and its headline once it is over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import streamlit as st

from app import formatting
from app.components import activity, figures, links, live_charts, notes, palette
from app.components.bars import Share, share_bar
from app.services import Services
from backend.metrics.stats import Phase, summary_to_dict
from db.run_rows import Run

if TYPE_CHECKING:
    from backend.metrics.live import LiveSnapshot

POLL_S = 1.0
_CANCELLING = "cancelling"


def show(services: Services) -> None:
    """The run under way, or the last one of this process; nothing before the first."""
    # Kept from look to look until the page is drawn anew: a run's kind and name do not change while it goes on.
    row_of = functools.cache(services.repository.get)
    activity.polled(
        services.queue.live, activity.is_active, lambda snapshot: _panel(services, snapshot, row_of), POLL_S
    )


def _panel(services: Services, snapshot: LiveSnapshot | None, row_of: Callable[[int], Run | None]) -> None:
    run = row_of(snapshot.run_id) if snapshot is not None else None
    if snapshot is None or (run is not None and run.kind != "serve"):
        if activity.is_active(snapshot) and run is not None:
            progress(services, snapshot, run)
            links.lab_link(run)
        _before_the_first(services)
        queue(services)
        return
    if activity.is_active(snapshot):
        under_way(services, snapshot, run)
    else:
        _ended(services, snapshot, run)
    queue(services)


def under_way(services: Services, snapshot: LiveSnapshot, run: Run | None = None) -> None:
    """A run of this process that is not over: what it does now, and how it goes so far. For `run` see `progress`."""
    progress(services, snapshot, run)
    with figures.row():
        _live_figures(snapshot)
    _pictures(snapshot)


def elsewhere(run: Run, then: str) -> None:
    """In words: a run that another process runs, and what follows when it ends."""
    doing = formatting.phase_text(Phase(**run.phase)) if run.phase else run.status
    st.info(notes.plain(f"{doing} (process {run.owner_pid} on {run.owner_host}). {then}"))


def _ended(services: Services, snapshot: LiveSnapshot, run: Run | None) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Run {notes.plain(_name(snapshot, run))}", anchor=False, width="content")
        notes.status_badge(snapshot.status)
        st.caption(f"after {formatting.duration(snapshot.elapsed_s)}", width="content")
        links.detail_link(snapshot.run_id)
        previous = previous_finished(services, snapshot.run_id)
        if snapshot.status == "finished" and previous is not None:
            links.compare_link([previous, snapshot.run_id], f"Compare with #{previous}")
    notes.failure(snapshot.status, snapshot.error)
    notes.recording_error(services, snapshot.run_id)
    if snapshot.summary is not None:
        figures.headline(summary_to_dict(snapshot.summary))
    _pictures(snapshot)


def _pictures(snapshot: LiveSnapshot) -> None:
    if snapshot.start_time is not None:
        columns = live_charts.columns_of(snapshot.series)
        with st.grid(3, min_column_width=260):
            st.vega_lite_chart(*live_charts.throughput(columns))
            st.vega_lite_chart(*live_charts.requests(columns))
            st.vega_lite_chart(*live_charts.kv_usage(columns))
        with st.grid(2, min_column_width=300):
            _memory(snapshot)
            _blocks(snapshot)
        st.caption(
            "Pictures begin when the model is there, with the warm-up if there is one; the figures above leave it out."
        )
    notes.show(snapshot.notices)


def _before_the_first(services: Services) -> None:
    """What will be here, or the newest run of an earlier process."""
    newest = services.repository.list(kind="serve", limit=1)
    if not newest:
        st.info(
            "Nothing has run yet. **Start** sends 16 chat prompts to a small model; throughput and latencies appear here "
            "while it answers them. The first start fetches the model where it is not there yet.",
            icon=":material/rocket_launch:",
        )
        return
    run = newest[0]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Last run: {notes.plain(run.title)}", anchor=False, width="content")
        notes.status_badge(run.status)
        links.detail_link(run.run_id)
    notes.failure(run.status, run.error)
    if run.summary:
        figures.headline(run.summary)


def _name(snapshot: LiveSnapshot, run: Run | None) -> str:
    return formatting.run_name(snapshot.run_id, run.label if run else None)


def progress(services: Services, snapshot: LiveSnapshot, run: Run | None = None) -> None:
    """What the run does, how far it is, and the button that ends it; `run` is its row, for a caller that has read it."""
    run = run or services.repository.get(snapshot.run_id)
    phase = snapshot.phase
    cancelling = st.session_state.get(_CANCELLING) == snapshot.run_id
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Run {notes.plain(_name(snapshot, run))}", anchor=False, width="content")
        share = min(1.0, max(0.0, phase.done / phase.total)) if phase.done is not None and phase.total else 0.0
        text = "cancelling" if cancelling else formatting.phase_text(phase)
        st.progress(share, text=f"{text} · {_elapsed(snapshot.elapsed_s)}")
        st.button(
            "Cancel",
            icon=":material/stop_circle:",
            key="cancel",
            disabled=cancelling,
            help="Ends the run within seconds. What has finished is kept.",
            on_click=_cancel,
            args=(services, snapshot.run_id),
        )


def _elapsed(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else formatting.duration(seconds)


def _cancel(services: Services, run_id: int) -> None:
    st.session_state[_CANCELLING] = run_id
    services.queue.cancel(run_id)


def _live_figures(snapshot: LiveSnapshot) -> None:
    ttft, tpot = snapshot.ttft_ms, snapshot.tpot_ms
    blocks = snapshot.num_referenced_blocks + snapshot.num_evictable_blocks + snapshot.num_free_blocks
    figures.figure(
        "Output",
        formatting.metric("output_throughput_tok_s", snapshot.output_tok_s),
        "output_throughput_tok_s",
        f"{formatting.metric('output_tokens', snapshot.output_tokens)} so far",
    )
    figures.figure(
        "TTFT p50", formatting.metric("ttft_ms", ttft.p50), "ttft_ms", f"p99 {formatting.metric('ttft_ms', ttft.p99)}"
    )
    figures.figure(
        "TPOT p50", formatting.metric("tpot_ms", tpot.p50), "tpot_ms", f"p99 {formatting.metric('tpot_ms', tpot.p99)}"
    )
    figures.figure(
        "Running / waiting",
        f"{formatting.count(snapshot.num_running)} / {formatting.count(snapshot.num_waiting)}",
        "Requests that take part in the engine's steps now / requests that have arrived and wait for room.",
        f"{formatting.count(snapshot.num_finished)} finished, {formatting.count(snapshot.num_failed)} failed",
    )
    figures.figure(
        "KV in use",
        formatting.percent(snapshot.num_referenced_blocks / blocks if blocks else None),
        "Referenced / usable KV blocks now. When none is free, a running request is preempted and computed again later.",
        f"preemptions {formatting.count(snapshot.preemptions)}",
    )


def _memory(snapshot: LiveSnapshot) -> None:
    parts = [
        ("weights", snapshot.weights_bytes, palette.WEIGHTS),
        ("KV cache", snapshot.kv_cache_bytes, palette.IN_USE),
        ("rest", snapshot.rest_bytes, palette.FREE),
    ]
    shares = [Share(label, amount, formatting.memory(amount), colour) for label, amount, colour in parts if amount]
    share_bar("Memory", shares, formatting.memory(sum(share.amount for share in shares)))


def _blocks(snapshot: LiveSnapshot) -> None:
    parts = [
        ("referenced", snapshot.num_referenced_blocks, palette.IN_USE),
        ("evictable", snapshot.num_evictable_blocks, palette.CACHED),
        ("free", snapshot.num_free_blocks, palette.FREE),
    ]
    shares = [Share(label, amount, formatting.count(amount), colour) for label, amount, colour in parts]
    share_bar("KV blocks", shares, formatting.count(sum(amount for _, amount, _ in parts)))


def queue(services: Services) -> None:
    """The runs that wait."""
    for run_id in services.queue.queued():
        with st.container(horizontal=True, vertical_alignment="center"):
            links.detail_link(run_id, f"#{run_id} is queued")
            st.button(
                "Cancel",
                icon=":material/stop_circle:",
                key=f"cancel-{run_id}",
                type="tertiary",
                on_click=_cancel,
                args=(services, run_id),
            )


def previous_finished(services: Services, run_id: int) -> int | None:
    """The newest finished run before this one."""
    earlier = (
        run.run_id
        for run in services.repository.list(statuses={"finished"}, kind="serve", limit=10)
        if run.run_id < run_id
    )
    return next(earlier, None)
