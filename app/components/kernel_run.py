"""One run of the kernel lab: its figures, the roofline, the table; and others beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import figures, kernel_charts, notes, palette, run_actions
from app.components.kernel_form import ADDRESS, RUN
from app.components.run_table import lab_text
from app.services import Services
from app.state import address_of, run_ids_in
from backend.experiments.kernel_results import ComparedTiming, compare_timings, left_out, timings
from db.run_ids import parse_run_id
from db.run_rows import Run

MAX_COMPARED = 4

_WITH = "kernel-with"
_MAX_LISTED = 200
_SHORT_TABLE = 16


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
    if timed and run.load:
        st.altair_chart(
            kernel_charts.roofline(
                timed,
                read_gb_per_s=max(row["read_limit_gb_per_s"] for row in timed),
                matmul_tflop_per_s=max(row["matmul_limit_tflop_per_s"] for row in timed),
            ),
            key="kernel-roofline",
        )
        if without := sorted({row["op"] for row in timed if not row["flops"]}):
            st.caption(f"Without arithmetic, so not in the picture: {notes.plain(', '.join(without))}.")
    if timed:
        _table(timed)
    elif checks := [row for row in results if row["experiment"] == "check"]:
        _checks(checks)
    elif run.is_final and not any(row["experiment"] == "attention" for row in results):
        st.info("This run ended before it had a result.", icon=":material/speed:")
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


def _table(timed: Sequence[Any]) -> None:
    rows = [
        {
            "Op": row["op"],
            "Shape": row["shape"],
            "Timed": kernel_charts.IMPLEMENTATIONS[row["implementation"]],
            "p50 µs": _rounded(row["p50_us"]),
            "p20..p80": f"{formatting.number(row['p20_us'])}..{formatting.number(row['p80_us'])}",
            "GB/s": _rounded(row["gb_per_s"]),
            "TFLOP/s": _rounded(row["tflop_per_s"]),
            "Share of limit": row["share_of_limit"] * 100,
            "Limit": row["limited_by"],
            "Kernel's check": check_text(row),
            "Max abs error": formatting.number(row["max_abs_error"]),
        }
        for row in timed
    ]
    column = st.column_config
    st.dataframe(
        pd.DataFrame(rows),
        hide_index=True,
        lazy=False,
        height="content" if len(rows) <= _SHORT_TABLE else 600,
        placeholder=formatting.NONE,
        key="kernel-table",
        column_config={
            "Op": column.TextColumn(pinned=True),
            "p50 µs": column.NumberColumn(format="localized", help="Median of the samples."),
            "p20..p80": column.TextColumn(help="The middle 60 % of the samples, µs."),
            "GB/s": column.NumberColumn(format="localized", help="Bytes that have to move / p50."),
            "TFLOP/s": column.NumberColumn(format="%.3g", help="Arithmetic of the formula / p50."),
            "Share of limit": column.ProgressColumn(
                format="%.1f %%",
                min_value=0,
                max_value=100,
                help="The larger of GB/s over the read limit and TFLOP/s over the matmul limit.",
            ),
            "Limit": column.TextColumn(help="Which of the two limits the share is of."),
            "Kernel's check": column.TextColumn(help="Triton kernel against the torch reference, in this run."),
        },
    )


def _checks(checks: Sequence[Any]) -> None:
    rows = [
        {
            "Op": row["op"],
            "Shape": row["shape"],
            "Kernel's check": check_text(row),
            "Max abs error": formatting.number(row["max_abs_error"]),
            "Max rel error": formatting.number(row["max_rel_error"]),
        }
        for row in checks
    ]
    st.dataframe(pd.DataFrame(rows), hide_index=True, lazy=False, height="content", key="kernel-checks")


def check_text(row: Any) -> str:
    """A check in words; "not checked" where the run has none for this op."""
    if row["passed"] is None:
        return "not checked"
    where = ", interpreted" if row["interpreted"] else ""
    return f"{'passed' if row['passed'] else 'FAILED'}{where}"


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
    height = "content" if len(compared) <= _SHORT_TABLE else 600
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


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
