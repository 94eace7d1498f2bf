"""The lab's two experiments beside single ops: attention over length, and CUDA graphs on and off."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import formatting
from app.components import kernel_charts, kernel_form, links, notes
from app.services import Services
from backend.experiments.kernel_graphs import DEFAULT_MODEL, LABELS, NUM_REQUESTS, decode_step, newest_pair
from db.run_ids import parse_run_id
from db.run_rows import Run

_MAX_SEARCHED = 100

_EXPLANATION = r"""
An op must move some bytes and do some arithmetic, whatever its implementation. This machine moves at most so many bytes a
second and multiplies at most so fast, and both limits were measured here, just before the ops were timed. An op whose
arithmetic intensity (FLOP per byte) is left of the ridge is bound by memory, right of it by arithmetic; the roof over both
is the most it can reach. Each timed call finds its inputs out of cache, first calls are left out, and a figure more than
5 % above a limit is taken for a wrong measurement. Before a kernel counts as correct, its outputs are filled with NaN, so
that every element is proved to be written.

$$\text{attainable FLOP/s} = \min(\text{matmul limit},\; \text{intensity} \times \text{read limit})$$

Williams, Waterman, Patterson: *Roofline: an insightful visual performance model for multicore architectures*, 2009.

Attention that writes its scores out needs memory, and time to move it, that grows with the square of the length; fused
attention keeps a tile of scores at a time (Dao et al.: *FlashAttention*, 2022).
"""


def attention(services: Services) -> None:
    """The attention comparison that the address names, or else the newest."""
    run, rows = _attention_run(services)
    st.button(
        "Compare attention",
        icon=":material/play_arrow:",
        key="attention-start",
        help="Takes about 15 seconds on two CPU cores. The form's dtype counts.",
        on_click=kernel_form.start,
        args=(services, ("attention",)),
    )
    if run is None:
        st.info(
            "No comparison yet. It times one request's attention at growing lengths: with every score in memory, with "
            "torch's fused version, and with ours over the paged cache.",
            icon=":material/show_chart:",
        )
        return
    with st.grid(2, min_column_width=320):
        st.altair_chart(kernel_charts.attention_time(rows), key="attention-time")
        st.altair_chart(kernel_charts.attention_memory(rows), key="attention-memory")
    longest = max(row["length"] for row in rows)
    ends = {row["implementation"]: row for row in rows if row["length"] == longest and row["p50_us"] is not None}
    parts = [
        f"{name} {formatting.number(row['p50_us'] / 1e3)} ms and {formatting.memory(row['peak_memory_bytes'])}"
        for name, row in ends.items()
    ]
    where = (run.environment or {}).get("gpu") or (run.environment or {}).get("cpu") or "this machine"
    st.caption(
        notes.plain(f"Run {run.title} on {where}, {rows[0]['dtype']}. At {longest:,} tokens: {'; '.join(parts)}.")
    )
    for row in rows:
        if row["problem"]:
            st.caption(notes.plain(f"{row['implementation']} at {row['length']:,} tokens: {row['problem']}."))


def graphs(services: Services, on_cuda: bool) -> None:
    """The newest two runs that differ in CUDA graphs only."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        model = st.text_input(
            "Model", value=DEFAULT_MODEL, key="graphs-model", width=260, help="A model's name, or dummy:<shape>."
        )
        st.button(
            "Run with graphs and without",
            icon=":material/play_arrow:",
            key="graphs-start",
            disabled=not on_cuda,
            help=f"Two runs of {NUM_REQUESTS} requests that decode together, recorded like any other.",
            on_click=kernel_form.start_graphs,
            args=(services, model.strip()),
        )
    pair = newest_pair(services.repository.list(statuses={"finished"}, kind="serve", limit=_MAX_SEARCHED))
    if not on_cuda:
        st.info(
            "This needs a GPU, and there is none here: CUDA graphs replay a decode step's kernel launches at once, so that "
            "the host's time to launch them is not in every step. On a CPU there is nothing to launch.",
            icon=":material/memory:",
        )
    if pair is None:
        if on_cuda:
            st.info("No pair of runs yet that differs in CUDA graphs only.", icon=":material/bar_chart:")
        return
    steps = {
        LABELS[eager]: decode_step(services.repository.steps(run_id))
        for eager, run_id in zip((False, True), pair, strict=True)
    }
    known = {name: step for name, step in steps.items() if step is not None}
    if len(known) == 2:
        st.altair_chart(kernel_charts.graph_bars(known), key="graph-bars")
        counts = ", ".join(f"{formatting.count(step.num_steps)} steps {name[12:]}" for name, step in known.items())
        st.caption(f"Medians over the steps that only decode: {counts}.")
    links.compare_link(list(pair), f"Compare #{pair[0]} with #{pair[1]}")


def explanation() -> None:
    """What the page shows, closed until somebody asks."""
    with st.expander("What am I looking at?", icon=":material/help:"):
        st.markdown(_EXPLANATION)


def _attention_run(services: Services) -> tuple[Run | None, list[dict[str, Any]]]:
    asked = parse_run_id(st.query_params.get("run", ""))
    listed = services.repository.list(kind="kernels", limit=_MAX_SEARCHED)
    for run in sorted(listed, key=lambda run: run.run_id != asked):
        if "attention" in run.config["experiments"]:
            rows = [row for row in services.repository.kernel_results(run.run_id) if row["experiment"] == "attention"]
            if rows:
                return run, rows
    return None, []
