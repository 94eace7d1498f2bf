"""One run of the quantization lab: the matrix and the Pareto picture, and another run beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from app import formatting
from app.components import notes, quantization_charts, quantization_matrix, quantization_scans, run_actions
from app.components.quantization_form import ADDRESS, RUN
from app.components.quantization_save import save_text
from app.components.run_table import quantization_text
from app.services import Services
from backend.config import DEFAULT_MODEL
from backend.errors import ConfigError
from backend.experiments.quantization_config import REFERENCE, parse_variant
from backend.experiments.quantization_results import wholes
from db.run_ids import parse_run_id
from db.run_rows import Run

_WITH = "quantization-with"
_COST, _LOSS = "quantization-cost", "quantization-loss"
_MAX_LISTED = 200
_SHORT = {
    "weights_bytes": "Weights",
    "bits_per_weight": "Bits",
    "kv_bytes_per_token": "KV",
    "decode_1_tok_s": "Decode ×1",
    "decode_32_tok_s": "Decode ×32",
    "prefill_tok_s": "Prefill",
    "kl_mean": "KL",
    "perplexity": "Perplexity",
}

_OWN_GRID = (
    "The default model was published in Q4_1: its weights lie on grids of 16 values, one for each group of 32, which begin at "
    "a floating minimum. int4 in groups of 32 with such a minimum finds these grids again and loses nothing. An integer zero "
    "point lays 0 on each grid, and the other values beside the weights. Other groups and 3 bits show what methods are worth."
)


def pick(services: Services) -> tuple[Run | None, Run | None]:
    """The run that the address names, by default the newest, and the one beside it."""
    listed = services.repository.list(kind="quantization", limit=_MAX_LISTED)
    runs = {run.run_id: run for run in listed if is_comparison(run)}
    _follow_address(services, runs)
    if not runs:
        return None, None
    with st.grid(2, min_column_width=260):
        shown = st.selectbox("Run", list(runs), format_func=lambda run_id: _name(runs[run_id]), key=RUN)
        others = [run_id for run_id in runs if run_id != shown]
        if st.session_state[_WITH] not in others:
            st.session_state[_WITH] = None
        beside = st.selectbox(
            "Compare with",
            others,
            index=None,
            format_func=lambda run_id: _name(runs[run_id]),
            key=_WITH,
            placeholder="a run of another model, text, card or version",
        )
    _write_address(shown, beside)
    return runs[shown], None if beside is None else runs[beside]


def is_comparison(run: Run) -> bool:
    """And no scan or saved variant, which the run that it belongs to shows."""
    return run.kind == "quantization" and run.config["experiment"] == "compare"


def show(services: Services, run: Run, beside: Run | None) -> list[Any]:
    """Returns the run's results."""
    results = services.repository.quantization_results(run.run_id)
    _heading(services, run)
    if not run.is_final:
        return []
    notes.failure(run.status, run.error)
    notes.recording_error(services, run.run_id)
    notes.show(run.notices)
    if not results:
        st.info("This run ended before it had a figure.", icon=":material/compress:")
        return []
    quantization_matrix.show(results)
    st.caption(notes.plain(_what(run, results)))
    if run.model == DEFAULT_MODEL and any(_has_groups_of_32(row["variant"]) for row in wholes(results)):
        st.caption(_OWN_GRID)
    if beside is not None:
        _compared(services, run, results, beside)
    _picture(results)
    return results


def _has_groups_of_32(variant: str) -> bool:
    try:
        return variant != REFERENCE and parse_variant(variant).quantization.group_size == 32
    except ConfigError:  # stored by another version
        return False


def _heading(services: Services, run: Run) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Run {notes.plain(run.title)}", anchor=False, width="content")
        if not run.is_final:  # how far it is, and what it has so far, stand above
            st.caption("goes on; its figures stand above as they come", width="content")
            return
        notes.status_badge(run.status)
        environment = run.environment or {}
        machine = environment.get("gpu") or environment.get("cpu") or "machine not known"
        st.caption(notes.plain(f"{run.model} on {machine}. {formatting.timestamp(run.created_at)}."), width="content")
        run_actions.export(services, [run])


def _what(run: Run, results: Sequence[Any]) -> str:
    """What the figures are of, in a sentence or two."""
    load, text = run.load or {}, run.config["text"]
    scored = next((row["num_tokens"] for row in results if row["num_tokens"]), None)
    source = "the text that ships" if text is None else Path(text).name
    parts = [
        f"{formatting.count(scored)} tokens of {source} in windows of {formatting.count(load.get('window'))}",
        f"the reference in {load.get('dtype') or 'its dtype'}",
        "small figures: the difference from the reference",
    ]
    if calibration := run.config.get("calibration"):  # not of runs of other versions
        parts.insert(1, f"calibration on {Path(calibration).name}")
    sentence = "; ".join(parts) + "."
    if any(row["emulated"] for row in results):
        sentence += " Where speeds and peak memory are missing, products are emulated: hold the pointer over the dash."
    return sentence


def _compared(services: Services, run: Run, results: Sequence[Any], beside: Run) -> None:
    others = services.repository.quantization_results(beside.run_id)
    common = {row["variant"] for row in wholes(others)} & {row["variant"] for row in wholes(results)}
    st.subheader(f"Beside run {notes.plain(beside.title)}", anchor=False)
    if not common:
        st.info("These runs have no variant in common.", icon=":material/compare_arrows:")
        return
    quantization_matrix.show([row for row in wholes(results) if row["variant"] in common], others)
    differing = [
        f"{name} {formatting.setting(own)}, there {formatting.setting(other)}"
        for name, own, other in (
            ("model", run.model, beside.model),
            ("text", run.config["text"] or "as shipped", beside.config["text"] or "as shipped"),
            ("tokens", run.config["max_tokens"], beside.config["max_tokens"]),
            (
                "calibration",
                run.config.get("calibration") or "as shipped",
                beside.config.get("calibration") or "as shipped",
            ),
            ("machine", _machine(run), _machine(beside)),
            ("torch", _torch(run), _torch(beside)),
        )
        if own != other
    ]
    what = f" They differ in {'; '.join(differing)}." if differing else ""
    st.caption(
        notes.plain(f"Figures of #{run.run_id}; small, the difference from the same variant in #{beside.run_id}.{what}")
    )


def _picture(results: Sequence[Any]) -> None:
    rows = wholes(results)
    costs = _varying(rows, quantization_charts.COSTS)
    losses = _varying(rows, quantization_charts.LOSSES)
    if not costs or not losses:
        return
    for key, options in ((_COST, costs), (_LOSS, losses)):
        if st.session_state.get(key) not in options:
            st.session_state[key] = options[0]
    with st.container(horizontal=True):
        cost = _choice("What it takes", costs, _COST)
        loss = _choice("What it loses", losses, _LOSS)
    st.altair_chart(quantization_charts.pareto(rows, cost, loss), key="quantization-pareto")
    missing = sum(row[cost] is None and not row["problem"] for row in rows)
    if missing:
        st.caption(f"{missing} variants have no such speed and are not in the picture: they are emulated.")


def _varying(rows: Sequence[Any], names: Sequence[str]) -> list[str]:
    return [name for name in names if len({row[name] for row in rows} - {None}) > 1]


def _choice(label: str, options: Sequence[str], key: str) -> str:
    chosen = st.segmented_control(
        label, options, format_func=lambda name: _SHORT[name], key=key, required=True, width="content"
    )
    return chosen or options[0]


def _follow_address(services: Services, runs: dict[int, Run]) -> None:
    """Give the widgets what the address says when something else than them changed it; see to it that they can show it."""
    state = st.session_state
    address = (st.query_params.get("run", ""), st.query_params.get("with", ""))
    if state.get(ADDRESS, "") is not None and (address != state.get(ADDRESS) or RUN not in state):
        state[RUN], state[_WITH] = parse_run_id(address[0]), parse_run_id(address[1].partition(",")[0])
        for key in (RUN, _WITH):
            run = services.repository.get(state[key]) if state[key] is not None and state[key] not in runs else None
            if run is not None and is_comparison(run):
                runs[run.run_id] = run
        if address[0] and state[RUN] not in runs and not _show_part(services, runs):
            st.warning(notes.plain(f"There is no quantization run {address[0]}. It may have been deleted."))
    state.setdefault(_WITH, None)
    if state.get(RUN) not in runs:
        state[RUN] = next(iter(runs), None)
    if not runs:
        state.pop(RUN, None)


def _show_part(services: Services, runs: dict[int, Run]) -> bool:
    """An address that names a scan, or a variant that was saved, leads to the newest run that shows it."""
    part = services.repository.get(st.session_state[RUN]) if st.session_state[RUN] is not None else None
    if part is None or part.kind != "quantization":
        return False
    wanted = set(part.config["variants"])
    owner = next(
        (run for run in runs.values() if run.model == part.model and wanted <= set(run.config["variants"])), None
    )
    if owner is not None:
        st.session_state[RUN] = owner.run_id
        quantization_scans.follow(part)
    if part.config["experiment"] == "save":
        st.info(notes.plain(f"Run {part.title} {save_text(part)}"), icon=":material/save:")
    return True


def _write_address(shown: int, beside: int | None) -> None:
    wanted = {"run": str(shown)} | ({} if beside is None else {"with": str(beside)})
    st.session_state[ADDRESS] = (wanted["run"], wanted.get("with", ""))
    for name in ("run", "with"):
        if wanted.get(name) != st.query_params.get(name):
            if name in wanted:
                st.query_params[name] = wanted[name]
            else:
                del st.query_params[name]


def _name(run: Run) -> str:
    """Of what does not change while the run goes on: the browser keeps the name that it has shown."""
    return f"{run.title}: {run.model}, {quantization_text(run.config).partition(': ')[2]}"


def _machine(run: Run) -> str:
    environment = run.environment or {}
    return environment.get("gpu") or environment.get("cpu") or "unknown"


def _torch(run: Run) -> str:
    return ((run.environment or {}).get("versions") or {}).get("torch") or "unknown"
