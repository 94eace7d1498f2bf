"""One run of the kernel lab: its figures, the roofline, the table; and others beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import figures, kernel_charts, kernel_tables, notes, palette, run_actions
from app.components.kernel_form import ADDRESS, RUN
from app.components.run_table import lab_text
from app.services import Services
from app.state import address_of, run_ids_in
from backend.experiments.kernel_results import ComparedTiming, compare_timings, left_out, timings
from db.run_ids import parse_run_id
from db.run_rows import Run

MAX_COMPARED = 4

_WITH = "kernel-with"
_COLOURED = "kernel-coloured"
_MAX_LISTED = 200


def pick(services: Services) -> tuple[Run | None, list[Run]]:
    """The run that the address names, by default the newest, and those to compare it with."""
    listed = services.repository.list(kind="kernels", limit=_MAX_LISTED)
    runs = {run.run_id: run for run in listed if set(run.config["experiments"]) != {"attention"}}
    _follow_address(services, runs, listed)
    if not runs:
        return None, []
    with st.grid(4, min_column_width=200) as grid:
        with grid.cell(column_span=2):
            shown = st.selectbox("Kernel run", list(runs), format_func=lambda run_id: _name(runs[run_id]), key=RUN)
        with grid.cell(column_span=2):
            others = [run_id for run_id in runs if run_id != shown]
            st.session_state[_WITH] = [run_id for run_id in st.session_state[_WITH] if run_id in others]
            compared = st.multiselect(
                "Compare with",
                others,
                format_func=lambda run_id: _name(runs[run_id]),
                key=_WITH,
                placeholder="runs of another card or version",
                max_selections=MAX_COMPARED,
            )
    _write_address(shown, compared)
    return runs[shown], [runs[run_id] for run_id in compared]


def show(services: Services, run: Run, others: Sequence[Run]) -> None:
    results = services.repository.kernel_results(run.run_id)
    _heading(services, run)
    notes.failure(run.status, run.error)
    notes.show(run.notices)
    timed = timings(results)
    if run.load:
        _figures(run, results)
    checks = [row for row in results if row["experiment"] == "check"]
    if timed and run.load:
        _roofline(timed)
    if timed:
        kernel_tables.timings(timed)
    elif checks:
        kernel_tables.checks(checks)
    elif run.is_final and not any(row["experiment"] == "attention" for row in results):
        st.info("This run ended before it had a result.", icon=":material/speed:")
    if timed and checks:
        with st.expander(f"Checks of kernels ({len(checks)})"):
            kernel_tables.checks(checks)
    if reasons := left_out([row for row in results if row["experiment"] == "bench"]):
        with st.expander(f"Left out on this machine ({len(reasons)} reasons)"):
            st.markdown("\n".join(f"- {notes.plain(reason)}" for reason in reasons))
    if others:
        _compare(services, [*others, run])


def _heading(services: Services, run: Run) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Run {notes.plain(run.title)}", anchor=False, width="content")
        if not run.is_final:  # how far it is stands above, and goes on there
            st.caption("goes on; results appear here when it ends", width="content")
            return
        notes.status_badge(run.status)
        st.caption(notes.plain(f"{_machine(run)}. {formatting.timestamp(run.created_at)}."), width="content")
        run_actions.export(services, [run])


def _figures(run: Run, results: Sequence[dict[str, Any]]) -> None:
    limits = run.load or {}
    read_limits = [limits["read_limit_gb_per_s"], *(row["read_limit_gb_per_s"] for row in timings(results))]
    checks = [row for row in results if row["experiment"] == "check"]
    passed = sum(bool(row["passed"]) for row in checks)
    where = "in Triton's interpreter" if any(row["interpreted"] for row in checks) else "on the GPU"
    best = max((row for row in results if row["share_of_limit"] is not None), key=_share, default=None)
    with st.grid(4, min_column_width=200, gap="small"):
        figures.figure(
            "Read limit",
            f"{formatting.number(max(read_limits))} GB/s",
            "The fastest sum or copy of memory that fits no cache, measured when the run began, and again where a timing was "
            "above it. No figure may be.",
        )
        figures.figure(
            "Matmul limit",
            f"{formatting.number(limits['matmul_limit_tflop_per_s'])} TFLOP/s",
            "A large product of square matrices by torch in the run's dtype, measured when the run began.",
        )
        figures.figure(
            "Checks passed",
            f"{passed} of {len(checks)}" if checks else formatting.NONE,
            "Kernels that agree with their reference within the op's tolerance, every output element written.",
            where if checks else "not checked in this run",
        )
        figures.figure(
            "Closest to a limit",
            formatting.percent(best["share_of_limit"]) if best else formatting.NONE,
            "The largest share of the read or the matmul limit that any timing reaches.",
            f"{best['op']}, {best['limited_by']}" if best else None,
        )


def _roofline(timed: Sequence[Any]) -> None:
    best: dict[str, float] = {}  # of each op with arithmetic, its largest share of a limit
    for row in timed:
        if row["flops"]:
            best[row["op"]] = max(best.get(row["op"], 0.0), _share(row))
    closest = sorted(best, key=lambda op: -best[op])
    most = len(kernel_charts.OP_COLOURS)
    state = st.session_state
    if _COLOURED not in state or (state[_COLOURED] and not best.keys() & set(state[_COLOURED])):  # those of another run
        state[_COLOURED] = list(best) if len(best) <= most else closest[: kernel_charts.MAX_NAMED]
    state[_COLOURED] = [op for op in state[_COLOURED] if op in best]
    coloured = st.multiselect(
        "Ops in colour",
        list(best),
        key=_COLOURED,
        max_selections=most,
        placeholder="none",
        help=f"The others are grey. At first all, or of more than {most} the {kernel_charts.MAX_NAMED} that come closest to a "
        "limit. Hold the pointer over any point for its op.",
    )
    st.altair_chart(
        kernel_charts.roofline(
            timed,
            read_gb_per_s=max(row["read_limit_gb_per_s"] for row in timed),
            matmul_tflop_per_s=max(row["matmul_limit_tflop_per_s"] for row in timed),
            coloured=coloured,
        ),
        key="kernel-roofline",
    )
    if without := sorted({row["op"] for row in timed if not row["flops"]}):
        st.caption(f"Without arithmetic, so not in the picture: {notes.plain(', '.join(without))}.")


def _compare(services: Services, runs: Sequence[Run]) -> None:
    st.subheader("Compared", anchor=False)
    compared = compare_timings([services.repository.kernel_results(run.run_id) for run in runs])
    if not compared:
        st.info("These runs have no op, shape, dtype and implementation in common.", icon=":material/compare_arrows:")
        return
    headings = [f"#{run.run_id}, {_short_machine(run)}" for run in runs]
    headings[0] += " (baseline)"
    texts, styles = [], []
    for timing in compared:
        implementation = kernel_charts.IMPLEMENTATIONS[timing.implementation]
        texts.append([timing.op, timing.shape, timing.dtype, implementation, *_cells(timing)])
        styles.append([""] * 4 + [_style(timing, place) for place in range(len(runs))])
    columns = ["Op", "Shape", "Dtype", "Timed", *headings]
    table = pd.DataFrame(texts, columns=columns)
    styled = table.style.apply(lambda _: pd.DataFrame(styles, columns=columns), axis=None)
    height = "content" if len(compared) <= kernel_tables.SHORT_TABLE else 600
    st.dataframe(styled, hide_index=True, lazy=False, height=height, key="kernel-compared")
    st.caption(
        "p50 in µs, and the baseline's time over the run's: ×2 is twice as fast. Grey: the spreads p20 to p80 overlap, "
        "no difference shown. Versions: "
        + notes.plain("; ".join(f"#{run.run_id} {_versions(run)}" for run in runs))
        + "."
    )


def _cells(timing: ComparedTiming) -> list[str]:
    cells = []
    for place, (p50, ratio) in enumerate(zip(timing.p50_us, timing.ratios, strict=True)):
        text = formatting.number(p50)
        cells.append(text if ratio is None or place == 0 else f"{text}  (×{formatting.number(ratio)})")
    return cells


def _style(timing: ComparedTiming, place: int) -> str:
    ratio = timing.ratios[place]
    if place == 0 or ratio is None:
        return ""
    if timing.overlap[place]:
        return f"color: {palette.BASELINE}"
    theme = st.context.theme.type or "light"
    return f"color: {palette.VERDICTS['better' if ratio > 1 else 'worse'][theme]}; font-weight: 600"


def _follow_address(services: Services, runs: dict[int, Run], listed: Sequence[Run]) -> None:
    """Give the widgets what the address says when something else than them changed it; see to it that they can show it."""
    state = st.session_state
    address = (st.query_params.get("run", ""), st.query_params.get("with", ""))
    if state.get(ADDRESS, "") is None:  # a run was started
        state.setdefault(_WITH, [])
    elif address != state.get(ADDRESS) or RUN not in state:
        asked = parse_run_id(address[0])
        state[RUN], state[_WITH] = asked, run_ids_in(address[1])[0][:MAX_COMPARED]
        for run_id in [asked, *state[_WITH]]:
            run = services.repository.get(run_id) if run_id is not None and run_id not in runs else None
            if run is not None and run.kind == "kernels":
                runs[run.run_id] = run
        if address[0] and asked not in runs and asked not in {run.run_id for run in listed}:
            st.warning(notes.plain(f"There is no kernel run {address[0]}. It may have been deleted."))
    state.setdefault(_WITH, [])
    if state.get(RUN) not in runs:
        state[RUN] = next(iter(runs), None)
    if not runs:
        state.pop(RUN, None)


def _write_address(shown: int, compared: Sequence[int]) -> None:
    wanted = {"run": str(shown)} | ({"with": address_of(compared)} if compared else {})
    st.session_state[ADDRESS] = (wanted["run"], wanted.get("with", ""))
    for name in ("run", "with"):
        if wanted.get(name) != st.query_params.get(name):
            if name in wanted:
                st.query_params[name] = wanted[name]
            else:
                del st.query_params[name]


def _name(run: Run) -> str:
    """Of what does not change while the run goes on: the browser keeps the name that it has shown."""
    what = lab_text(run.config).removeprefix("kernels: ")
    return f"{run.title}: {what}" + (f", {_short_machine(run)}" if run.environment else "")


def _machine(run: Run) -> str:
    environment = run.environment or {}
    return environment.get("gpu") or environment.get("cpu") or "machine not known yet"


def _short_machine(run: Run) -> str:
    return _machine(run).removeprefix("NVIDIA ")


def _versions(run: Run) -> str:
    environment = run.environment or {}
    versions = environment.get("versions") or {}
    parts = [f"{name} {versions[name]}" for name in ("torch", "triton") if versions.get(name)]
    commit = environment.get("commit")
    return ", ".join([*parts, *([f"commit {commit[:10]}"] if commit else [])]) or "unknown"


def _share(row: dict[str, Any]) -> float:
    return row["share_of_limit"]
