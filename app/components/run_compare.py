"""Runs against a baseline: figures, settings that differ, distributions and time series on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import links, notes, palette, run_charts
from app.state import address_of, run_ids_in
from backend.errors import ServeLabError
from backend.experiments.compare import Comparison, MetricRow, compare_runs
from db.repository import RunRepository
from db.run_ids import parse_run_id
from db.run_rows import Run

MAX_RUNS = 8

_RUNS, _BASELINE, _ADDRESS = "compare-runs", "compare-baseline", "compare-address"


def pick(repository: RunRepository, finished: Sequence[Run]) -> tuple[list[Run], int | None]:
    """The runs that the address names, and its baseline; choosing others changes the address."""
    runs = _known_runs(repository, finished)
    _follow_address(runs)
    with st.grid(4, min_column_width=200) as grid:
        with grid.cell(column_span=3):
            chosen = st.multiselect(
                "Runs",
                list(runs),
                format_func=lambda run_id: runs[run_id].title,
                key=_RUNS,
                placeholder="choose finished runs",
                max_selections=MAX_RUNS,
            )
        if st.session_state.get(_BASELINE) not in chosen:
            st.session_state[_BASELINE] = chosen[0] if chosen else None
        baseline = st.selectbox(
            "Baseline",
            chosen,
            format_func=lambda run_id: runs[run_id].title,
            key=_BASELINE,
            placeholder="the first run",
            disabled=len(chosen) < 2,
            help="What the others are compared with; grey in the charts.",
        )
    _write_address(chosen, baseline)
    return [runs[run_id] for run_id in chosen], baseline


def _known_runs(repository: RunRepository, finished: Sequence[Run]) -> dict[int, Run]:
    """What can be chosen: the finished runs, and those that the address names whatever their state."""
    runs = {run.run_id: run for run in finished}
    ids, strange = run_ids_in(st.query_params.get("runs"))
    missing = []
    for run_id in ids:
        run = runs.get(run_id) or repository.get(run_id)
        if run is None:
            missing.append(f"#{run_id}")
        else:
            runs[run_id] = run
    if missing or strange:
        st.warning(notes.plain(f"Not found: {', '.join([*missing, *strange])}. A run may have been deleted."))
    return runs


def _follow_address(runs: dict[int, Run]) -> None:
    """Give the widgets what the address says when it was changed by something else than them: a link, the back button."""
    address = (st.query_params.get("runs", ""), st.query_params.get("baseline", ""))
    if address != st.session_state.get(_ADDRESS) or _RUNS not in st.session_state:
        st.session_state[_RUNS] = run_ids_in(address[0])[0][:MAX_RUNS]
        st.session_state[_BASELINE] = parse_run_id(address[1])
    st.session_state[_RUNS] = [run_id for run_id in st.session_state[_RUNS] if run_id in runs]


def _write_address(chosen: Sequence[int], baseline: int | None) -> None:
    wanted = {"runs": address_of(chosen)} if chosen else {}
    if baseline is not None and chosen and baseline != chosen[0]:
        wanted["baseline"] = str(baseline)
    st.session_state[_ADDRESS] = (wanted.get("runs", ""), wanted.get("baseline", ""))
    if wanted != st.query_params.to_dict():
        st.query_params.from_dict(wanted)


def show(repository: RunRepository, runs: Sequence[Run], baseline: int | None) -> None:
    try:
        comparison = compare_runs(runs, baseline)
    except ServeLabError as error:
        st.error(notes.plain(str(error)), icon=":material/error:")
        return
    colours = palette.run_colours(comparison.run_ids, comparison.baseline)
    names = {run.run_id: run.title for run in runs}
    if failures := formatting.failed_requests({run.run_id: run.summary for run in runs}):
        st.warning(notes.plain(failures), icon=":material/warning:")
    if synthetic := formatting.synthetic_runs({run.run_id: run.config for run in runs}):
        st.warning(notes.plain(synthetic), icon=":material/warning:")
    if len(runs) == 2:
        links.scheduler_link(runs[0].run_id, "Their schedules on one time axis", beside=runs[1].run_id)
    _figures(comparison, names)
    _settings(comparison, names)
    _distributions(repository, comparison, colours)
    _time_series(repository, comparison, colours)


def _figures(comparison: Comparison, names: dict[int, str]) -> None:
    st.subheader("Figures", anchor=False)
    texts, styles = [], []
    for row in comparison.metrics:
        texts.append([_name(row.metric), *(_cell(row, index) for index in range(len(row.values)))])
        styles.append(["", *(_style(verdict) for verdict in row.verdicts)])
    columns = ["Figure", *(_heading(run_id, comparison, names) for run_id in comparison.run_ids)]
    table = pd.DataFrame(texts, columns=columns)
    styled = table.style.apply(lambda _: pd.DataFrame(styles, columns=columns), axis=None)
    st.dataframe(styled, hide_index=True, lazy=False, height="content", key="compare-figures")
    st.caption(
        f"Differences are against {notes.plain(names[comparison.baseline])}: green is better, red is worse, grey is no "
        "difference shown. One run each says nothing about noise: repeat runs before trusting small differences."
    )


def _settings(comparison: Comparison, names: dict[int, str]) -> None:
    st.subheader("Settings that differ", anchor=False)
    if not comparison.settings:
        st.caption("None: these runs were asked the same, on the same settings.")
        return
    columns = ["Setting", *(_heading(run_id, comparison, names) for run_id in comparison.run_ids)]
    rows = [
        [row.key, *(formatting.NONE if value is None else str(value) for value in row.values)]
        for row in comparison.settings
    ]
    st.dataframe(
        pd.DataFrame(rows, columns=columns), hide_index=True, lazy=False, height="content", key="compare-settings"
    )


def _distributions(repository: RunRepository, comparison: Comparison, colours: dict[int, str]) -> None:
    st.subheader("Latency", anchor=False)
    requests = {run_id: repository.requests(run_id) for run_id in comparison.run_ids}
    by_name = {f"#{run_id}": colour for run_id, colour in colours.items()}
    with st.grid(2, min_column_width=320):
        for metric in run_charts.LATENCIES:
            samples = {f"#{run_id}": run_charts.latencies(rows, metric) for run_id, rows in requests.items()}
            st.altair_chart(run_charts.latency(samples, by_name, metric))


def _time_series(repository: RunRepository, comparison: Comparison, colours: dict[int, str]) -> None:
    st.subheader("Over time", anchor=False)
    steps: dict[str, Any] = {
        f"#{run_id}": repository.steps(run_id, max_points=run_charts.MAX_STEPS) for run_id in comparison.run_ids
    }
    by_name = {f"#{run_id}": colour for run_id, colour in colours.items()}
    pictures = (
        ("num_output_tokens", "Output throughput", "tok/s"),
        ("num_running", "Running requests", "requests"),
        ("num_waiting", "Waiting requests", "requests"),
        ("kv_cache_usage", "KV cache in use", "share of blocks"),
    )
    with st.grid(2, min_column_width=320):
        for field, title, unit in pictures:
            st.altair_chart(run_charts.overlaid(steps, by_name, field, title=title, y_title=unit))


def _cell(row: MetricRow, index: int) -> str:
    text = formatting.metric(row.metric, row.values[index])
    if row.verdicts[index] == "equal":
        return f"{text}  (no difference shown)"
    change = row.differences[index]
    return text if not change else f"{text}  ({formatting.difference(change)})"


def _style(verdict: str | None) -> str:
    theme = st.context.theme.type or "light"
    match verdict:
        case "better" | "worse":
            return f"color: {palette.VERDICTS[verdict][theme]}; font-weight: 600"
        case "equal":
            return f"color: {palette.BASELINE}"
    return ""


def _name(metric: str) -> str:
    """Short, so that the percentile is not what a narrow page cuts off."""
    field, _, statistic = metric.partition(".")
    return f"{field.removesuffix('_ms').upper()} {statistic}" if statistic else formatting.metric_label(metric)


def _heading(run_id: int, comparison: Comparison, names: dict[int, str]) -> str:
    return f"{names[run_id]} (baseline)" if run_id == comparison.baseline else names[run_id]
