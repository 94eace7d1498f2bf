"""Proposers side by side: runs of the same model and workload, each with its acceptance and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import links, notes
from app.components.speculation_pick import (
    BESIDE,
    asked_differently,
    method_of,
    method_text,
    same_questions,
    settings_of,
    short_name,
)
from app.services import Services
from backend.experiments.compare import metric_value
from db.run_rows import Run

MAX_RUNS = 8

_SELECT = "speculation-beside-select"
_METRICS = {
    "Acceptance rate": "draft_acceptance_rate",
    "Acceptance length": "mean_acceptance_length",
    "TPOT p50": "tpot_ms.p50",
    "Output": "output_throughput_tok_s",
}


def show(services: Services, run: Run) -> None:
    others = {other.run_id: other for other in same_questions(services, run)}
    if not others:
        st.info(
            "Another proposer stands beside this one once a second run of the same model and workload has finished: run it again "
            "with another `speculative.method` or `speculative.num_speculative_tokens`.",
            icon=":material/compare_arrows:",
        )
        links.run_link()
        return
    chosen = [run, *_choose(run, others)]
    table(services, chosen)
    if len(chosen) > 1:
        links.compare_link(sorted(each.run_id for each in chosen), "All their figures")


def table(services: Services, runs: Sequence[Run]) -> None:
    """A row per run; speed also as a multiple of the first one without speculation, where there is one."""
    plain = next((run for run in runs if method_of(run) is None), None)
    rows = [_row(run, plain) for run in runs]
    st.dataframe(
        pd.DataFrame(rows),
        hide_index=True,
        lazy=False,
        height="content",
        placeholder=formatting.NONE,
        key="speculation-proposers",
    )
    what = "" if plain is None else f" Speedup is output tok/s over those of #{plain.run_id}, which did not speculate."
    st.caption(f"One run each, of the same prompts; TPOT is the median over its requests.{what}")
    first = services.repository.request_times(runs[0].run_id)
    for other in runs[1:]:
        clauses = asked_differently(first, services.repository.request_times(other.run_id))
        if clauses:
            text = f"#{runs[0].run_id} and #{other.run_id} are not alike: {'; '.join(clauses)}."
            st.warning(notes.plain(text), icon=":material/warning:")


def _choose(run: Run, others: dict[int, Run]) -> list[Run]:
    state = st.session_state
    asked = state.get(BESIDE)
    state[_SELECT] = [
        run_id for run_id in (_newest_of_each(run, others) if asked is None else asked) if run_id in others
    ]
    if asked is not None and (missing := [run_id for run_id in asked if run_id not in others]):
        names = ", ".join(f"#{run_id}" for run_id in missing)
        st.warning(notes.plain(f"Not of this model and workload, or not finished: {names}."))
        state[BESIDE] = state[_SELECT]
    st.multiselect(
        "Beside",
        list(others),
        format_func=lambda run_id: short_name(others[run_id]),
        key=_SELECT,
        placeholder="choose runs of the same workload",
        max_selections=MAX_RUNS,
        on_change=_take,
    )
    return [others[run_id] for run_id in state[_SELECT]]


def _take() -> None:
    st.session_state[BESIDE] = list(st.session_state[_SELECT])


def _newest_of_each(run: Run, others: dict[int, Run]) -> list[int]:
    """The newest run with each way to speculate, this run's own left out; the plain one among them."""
    newest: dict[str, int] = {}
    for run_id, other in others.items():
        newest.setdefault(repr(sorted(settings_of(other).items())), run_id)
    newest.pop(repr(sorted(settings_of(run).items())), None)
    return sorted(newest.values())[-MAX_RUNS:]


def _row(run: Run, plain: Run | None) -> dict[str, Any]:
    values = {name: metric_value(run.summary, metric) for name, metric in _METRICS.items()}
    theirs = metric_value(plain.summary, _METRICS["Output"]) if plain is not None else None
    ours = values["Output"]
    # What a run that drafted nothing differs by is chance.
    has_drafted = method_of(run) is None or values["Acceptance length"] is not None
    return {
        "Run": run.title,
        "Proposer": method_text(run) if has_drafted else f"{method_text(run)}: nothing drafted",
        **{name: formatting.metric(_METRICS[name], value) for name, value in values.items()},
        "Speedup": f"×{formatting.number(ours / theirs)}" if ours and theirs and has_drafted else None,
    }
