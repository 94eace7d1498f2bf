"""Everything stored of one run, a view at a time."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import activity, figures, links, live_panel, notes, palette, run_actions, run_charts, run_setup
from app.components.run_table import workload_text
from app.components.speculation_pick import method_of
from app.services import Services
from backend.core.speculation import is_synthetic
from backend.metrics.stats import DEFINITIONS
from db.run_rows import Run

_QUANTILES = ("p50", "p90", "p95", "p99", "mean", "std", "min", "max", "count")
_WHERE_THERE_ARE_ANY = ("ttft_ms_by_priority", "preemptions_swapped", "swapped_out_bytes", "swapped_in_bytes")


def show(services: Services, run: Run) -> None:
    _heading(services, run)
    if not run.is_final:
        activity.polled(
            lambda: services.repository.get(run.run_id),
            lambda now: now is not None and not now.is_final,
            lambda now: _under_way(services, now),
            live_panel.POLL_S,
        )
        return
    notes.failure(run.status, run.error)
    notes.recording_error(services, run.run_id)
    if run.summary:
        figures.headline(run.summary)
    notes.show(run.notices)
    views = {
        "Latency": _latency,
        "Over time": _over_time,
        "All figures": _all_figures,
        "Requests": _requests,
        "Setup": run_setup.show,
        "Name and notes": run_actions.label_and_notes,
    }
    tabs = st.tabs(list(views), key="view", on_change="rerun", bind="query-params")
    for tab, view in zip(tabs, views.values(), strict=True):
        if tab.open:
            with tab:
                view(services, run)


def _heading(services: Services, run: Run) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.title(f"Run {notes.plain(run.title)}", anchor=False, width="content")
        notes.status_badge(run.status)
        if is_synthetic(run.config):
            st.badge("synthetic", color="orange", icon=":material/casino:")
    st.caption(
        notes.plain(f"{run.model}: {workload_text(run.workload)}. Created {formatting.timestamp(run.created_at)}.")
    )
    with st.container(horizontal=True, vertical_alignment="center"):
        run_actions.rerun_button(services, run)
        if run.is_final:
            run_actions.export(services, [run])
        previous = live_panel.previous_finished(services, run.run_id)
        if run.status == "finished" and previous is not None:
            links.compare_link([previous, run.run_id], f"Compare with #{previous}")
        links.kv_cache_link(run.run_id)
        links.scheduler_link(run.run_id)
        if method_of(run) is not None:
            links.speculation_link(run.run_id)
        links.history_link()


def _under_way(services: Services, run: Run | None) -> None:
    """A run that goes on: with all that is known here, or in words when another process runs it."""
    if run is None:
        st.error("This run has been deleted.")
        return
    snapshot = services.queue.live(run.run_id)
    if activity.is_active(snapshot):
        live_panel.under_way(services, snapshot, run)
    else:
        live_panel.elsewhere(run, "Its figures appear here when it ends.")


def _latency(services: Services, run: Run) -> None:
    requests = services.repository.requests(run.run_id)
    samples = {metric: run_charts.latencies(requests, metric) for metric in run_charts.LATENCIES}
    if not any(samples.values()):
        st.info("No request of this run finished, so there is no latency to show.")
        return
    name = f"#{run.run_id}"
    with st.grid(2, min_column_width=320):
        for metric, sample in samples.items():
            st.altair_chart(run_charts.latency({name: sample}, {name: palette.PREFILL}, metric))
    st.caption(
        "Each curve is the share of samples at or below a latency: steep is steady, a long tail is a few slow ones."
    )


def _over_time(services: Services, run: Run) -> None:
    steps = services.repository.steps(run.run_id, max_points=run_charts.MAX_STEPS)
    if not steps:
        st.info("The engine took no step for this run, so there is nothing to show over time.")
        return
    with st.grid(2, min_column_width=320):
        st.altair_chart(run_charts.throughput(steps))
        st.altair_chart(run_charts.batch_composition(steps))
        st.altair_chart(run_charts.queue(steps))
        st.altair_chart(run_charts.kv_usage(steps))


def _all_figures(services: Services, run: Run) -> None:
    if not run.summary:
        st.info("This run ended before it had figures.")
        return
    summary = run.summary
    latencies = {DEFINITIONS[metric].label: summary[metric] for metric in run_charts.LATENCIES}
    for priority, values in (summary.get("ttft_ms_by_priority") or {}).items():
        latencies[f"TTFT of priority {priority}"] = values
    st.markdown("**Latencies**, in ms")
    st.dataframe(
        pd.DataFrame(
            [
                {"": label, **{key: _rounded(values.get(key)) for key in _QUANTILES}}
                for label, values in latencies.items()
            ]
        ).rename(columns={"count": "n"}),
        hide_index=True,
        lazy=False,
        placeholder=formatting.NONE,
        column_config={key: st.column_config.NumberColumn(format="localized") for key in (*_QUANTILES, "n")},
    )
    st.markdown("**All figures and what they mean**")
    rows = [
        {
            "Figure": entry.label,
            "Value": _value(summary, name),
            "Formula": entry.formula,
        }
        for name, entry in DEFINITIONS.items()
        if name in summary and (summary[name] is not None or name not in _WHERE_THERE_ARE_ANY)
    ]
    st.table(pd.DataFrame(rows), hide_index=True, border="horizontal")


def _value(summary: dict[str, Any], name: str) -> str:
    if name == "ttft_ms_by_priority":
        return "; ".join(f"{priority}: {_quantiles(name, values)}" for priority, values in summary[name].items())
    if name in run_charts.LATENCIES:
        return _quantiles(name, summary[name])
    return formatting.metric(name, summary[name])


def _quantiles(name: str, values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {formatting.metric(name, values[key])}" for key in ("p50", "p99"))


def _requests(services: Services, run: Run) -> None:
    rows = services.repository.requests(run.run_id)
    if not rows:
        st.info("No request of this run ended, so none is recorded.")
        return
    with_warmup = st.toggle("Show warm-up requests", key="with-warmup")
    rows = [row for row in rows if with_warmup or not row["warmup"]]
    with_priority = len({row["priority"] for row in rows}) > 1
    state = st.dataframe(
        pd.DataFrame([_request_row(row, with_priority) for row in rows]),
        key=f"requests-{run.run_id}-{with_warmup}",
        hide_index=True,
        lazy=False,
        on_select="rerun",
        selection_mode="single-row",
        placeholder=formatting.NONE,
        column_config={
            "Prompt": st.column_config.TextColumn(width="medium"),
            "Output": st.column_config.TextColumn(width="medium"),
        },
    )
    chosen = state["selection"]["rows"]
    if not chosen or chosen[0] >= len(rows):
        st.caption("Tick a request to read its prompt and output in full.")
        return
    row = rows[chosen[0]]
    with st.grid(2, min_column_width=320):
        for title, text in (("Prompt", row["prompt"]), ("Output", row["text"])):
            with st.container():
                st.markdown(f"**{title}**")
                st.code(
                    text or f"no text; token ids: {row['token_ids'] if title == 'Output' else 'not kept'}",
                    language=None,
                    wrap_lines=True,
                )


def _request_row(row: dict[str, Any], with_priority: bool) -> dict[str, Any]:
    sample = row["request_id"].removeprefix(row["parent_id"]) if row["parent_id"] else ""
    return {
        "Request": f"{'warm-up ' if row['warmup'] else ''}{row['index']}{sample}",
        **({"Priority": row["priority"]} if with_priority else {}),
        "Ended": row["finish_reason"],
        "Input tok": row["num_prompt_tokens"],
        "Output tok": row["num_output_tokens"],
        "Queue ms": _rounded(row["queue_ms"]),
        "Prefill ms": _rounded(row["prefill_ms"]),
        "TTFT ms": _rounded(row["ttft_ms"]),
        "TPOT ms": _rounded(row["tpot_ms"]),
        "E2EL ms": _rounded(row["e2el_ms"]),
        "Preempted": row["num_preemptions"],
        "Prompt": row["prompt"],
        "Output": row["text"],
        "Error": row["error"],
    }


def _rounded(value: float | None) -> float | int | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.3g}")
