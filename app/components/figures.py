"""Figures of a run: each with its unit, and its definition one click away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import formatting
from backend.experiments.compare import metric_value
from backend.metrics.stats import DEFINITIONS

HEADLINES = ("output_throughput_tok_s", "ttft_ms.p50", "tpot_ms.p50", "num_requests", "kv_cache_usage_max")

_SHORT = {
    "output_throughput_tok_s": "Output",
    "ttft_ms.p50": "TTFT p50",
    "tpot_ms.p50": "TPOT p50",
    "num_requests": "Requests",
    "kv_cache_usage_max": "Peak KV usage",
}


def headline(summary: Mapping[str, Any]) -> None:
    """The five figures a run is known by, in one row."""
    notes = {
        "output_throughput_tok_s": f"{formatting.metric('output_tokens', summary.get('output_tokens'))}",
        "ttft_ms.p50": _p99(summary, "ttft_ms"),
        "tpot_ms.p50": _p99(summary, "tpot_ms"),
        "num_requests": _outcome(summary),
        "kv_cache_usage_max": _preemptions(summary),
    }
    with row():
        for name in HEADLINES:
            figure(_SHORT[name], formatting.metric(name, metric_value(summary, name)), name, notes[name])


def row() -> Any:
    """A row that wraps on a narrow page instead of cutting its figures off."""
    return st.grid(5, min_column_width=130, gap="small")


def figure(label: str, value: str, meaning: str, note: str | None = None) -> None:
    """One headline figure; the question mark opens its meaning, a metric's definition or a sentence."""
    st.metric(
        label,
        value,
        delta=note,
        delta_color="off",
        delta_arrow="off",
        help=definition(meaning) if meaning.partition(".")[0] in DEFINITIONS else meaning,
        border=True,
        height="stretch",
    )


def definition(metric: str) -> str:
    """Name, unit and formula in one line of Markdown."""
    entry = DEFINITIONS[metric.partition(".")[0]]
    return f"**{entry.label}**: {entry.formula}"


def _p99(summary: Mapping[str, Any], metric: str) -> str | None:
    value = metric_value(summary, f"{metric}.p99")
    return None if value is None else f"p99 {formatting.metric(metric, value)}"


def _outcome(summary: Mapping[str, Any]) -> str:
    """How many finished, where that is not all: a cancelled run's others neither finished nor failed."""
    finished, failed = (summary.get("e2el_ms") or {}).get("count"), summary.get("num_failed")
    outcome = f"{formatting.count(failed)} failed" if failed else "none failed"
    if finished == summary.get("num_requests"):
        return outcome
    return f"{formatting.count(finished)} finished, {outcome}"


def _preemptions(summary: Mapping[str, Any]) -> str | None:
    number, swapped = summary.get("preemptions"), summary.get("preemptions_swapped")
    if number is None:
        return None
    text = f"preemptions {formatting.count(number)}"
    return text if swapped is None else f"{text}, {formatting.count(swapped)} swapped"
