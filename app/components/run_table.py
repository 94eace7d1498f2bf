"""Stored runs as a table in which rows can be ticked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from app.components.form_fields import ARRIVAL_KINDS, TRACES
from backend.core.speculation import is_synthetic
from backend.experiments.compare import metric_value
from backend.experiments.quantization_config import variant_name
from backend.workload.prompts import BUILT_IN_PROMPTS
from db.run_rows import Run

_STATUS_COLOURS = {
    "queued": "gray",
    "loading": "blue",
    "running": "blue",
    "finished": "green",
    "failed": "red",
    "cancelled": "gray",
    "interrupted": "orange",
}

_MAX_NAMED = 3  # variants of a quantization run
_SHORT_TABLE = 14  # rows that are shown without scrolling


def show(runs: Sequence[Run]) -> list[Run]:
    """Draw the table and return the ticked runs, in its order."""
    state = st.dataframe(
        table(runs),
        key=table_key(runs),
        hide_index=True,
        column_config=_columns(),
        on_select="rerun",
        selection_mode="multi-row",
        lazy=False,
        placeholder="–",
        height="content" if len(runs) <= _SHORT_TABLE else 520,
    )
    return [runs[row] for row in state["selection"]["rows"] if row < len(runs)]


def table_key(runs: Sequence[Run]) -> str:
    """The table's identity hangs on the runs it shows: ticks are kept by row number, and must not slide to other runs."""
    return f"runs-{sha256(','.join(str(run.run_id) for run in runs).encode()).hexdigest()[:12]}"


def table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per run; figures are rounded to three digits and stay numbers, so that they sort."""
    rows = [
        {
            "run": f"#{run.run_id}",
            "status": [run.status],
            "label": run.label,
            "output": _rounded(metric_value(run.summary, "output_throughput_tok_s")),
            "ttft": _rounded(metric_value(run.summary, "ttft_ms.p50")),
            "tpot": _rounded(metric_value(run.summary, "tpot_ms.p50")),
            "duration": _rounded(duration_s(run)),
            "model": run.model or None,
            "workload": asked_text(run),
            "created": run.created_at.astimezone(),
            "note": run.error or run.notes,
        }
        for run in runs
    ]
    return pd.DataFrame(rows)


def duration_s(run: Run) -> float | None:
    """Of a workload, the metric; a lab's run has no requests, and took from when its work began to its end."""
    if run.kind == "serve":
        return metric_value(run.summary, "duration_s")
    if run.started_at is None or run.ended_at is None:
        return None
    return (run.ended_at - run.started_at).total_seconds()


def asked_text(run: Run) -> str:
    """What a run was asked to do, in a few words."""
    match run.kind:
        case "kernels":
            return lab_text(run.config)
        case "quantization":
            return quantization_text(run.config)
        case "certificate":
            return certificate_text(run.config)
    synthetic = ", synthetic drafts" if is_synthetic(run.config) else ""
    return f"{workload_text(run.workload)}{synthetic}"


def lab_text(config: Mapping[str, Any]) -> str:
    """A kernel run's in a few words: "kernels: check, bench of all ops, bfloat16"."""
    ops = config.get("ops")
    what = (
        "" if set(config["experiments"]) == {"attention"} else " of all ops" if ops is None else f" of {len(ops)} ops"
    )
    dtype = config.get("dtype")
    return f"kernels: {', '.join(config['experiments'])}{what}" + (f", {dtype}" if dtype else "")


def quantization_text(config: Mapping[str, Any]) -> str:
    """A quantization run's in a few words: "quantization: int8, nf4 and 3 more"."""
    names = [variant_name(text) for text in config["variants"]]
    if config["experiment"] == "save":
        return f"saved: {names[0]} as {config['name']}"
    more = len(names) - _MAX_NAMED
    what = "quantization" if config["experiment"] == "compare" else config["experiment"]
    if config.get("by") == "layer":
        what += " by layer"
    return f"{what}: {', '.join(names[:_MAX_NAMED])}" + (f" and {more} more" if more > 0 else "")


def certificate_text(config: Mapping[str, Any]) -> str:
    """A certificate's in a few words: "certificate: ngram, 4,096 samples"."""
    return f"certificate: {config['engine']['speculative']['method']}, {config['num_samples']:,} samples"


def workload_text(workload: Mapping[str, Any]) -> str:
    """A workload in a few words: "chat prompts, Poisson 4/s, 64 out"; a trace has its own lengths."""
    source, arrivals = workload["source"], workload["arrivals"]
    asked = {
        "prompts": _prompts_text(source),
        "synthetic": f"{source.get('num_requests')} synthetic",
        "shared_prefix": "shared prefixes",
        "conversations": f"{source.get('num_conversations')} conversations",
        "trace": _first_of_file(source),
        "mooncake": _first_of_file(source),
    }[source["kind"]]
    if (n := workload.get("sampling", {}).get("n", 1)) > 1:
        asked += f" × {n} samples"
    if priorities := workload.get("priorities"):
        asked += f" of priority {', '.join(sorted(priorities, key=int))}"
    when = ARRIVAL_KINDS[arrivals["kind"]].lower()
    if "rate" in arrivals:
        when += f" {arrivals['rate']:g}/s"
    elif "concurrency" in arrivals:
        when += f" of {arrivals['concurrency']}"
    elif arrivals.get("speedup", 1) != 1:
        when += f" ×{arrivals['speedup']:g}"
    if source["kind"] in TRACES:
        return f"{asked}, {when}"
    length = workload["output_len"]
    return f"{asked}, {when}, {length if isinstance(length, int) else length['kind']} out"


def _prompts_text(source: Mapping[str, Any]) -> str:
    own, limit = source.get("prompts"), source.get("limit")
    if source.get("file"):
        text = _first_of_file(source)
    else:
        count = len(own or BUILT_IN_PROMPTS)
        text = f"{min(count, limit or count)} {'own' if own else 'built-in'}"
    return f"{text} {'chat' if source.get('chat') else 'raw'} prompts"


def _first_of_file(source: Mapping[str, Any]) -> str:
    name, limit = Path(source.get("file") or "").name, source.get("limit")
    return f"{limit} of {name}" if limit else name


def _columns() -> dict[str, Any]:
    config = st.column_config
    return {
        "run": config.TextColumn("Run", width=60, pinned=True),
        "status": config.MultiselectColumn(
            "Status", options=list(_STATUS_COLOURS), color=list(_STATUS_COLOURS.values()), width=100
        ),
        "label": config.TextColumn("Label", width=150),
        "model": config.TextColumn("Model", width=110),
        "workload": config.TextColumn("Workload", width=200, help="Or what a lab was asked."),
        "created": config.DatetimeColumn("Created", format="YYYY-MM-DD HH:mm", width=130),
        "output": config.NumberColumn("Output tok/s", format="localized", width=95),
        "ttft": config.NumberColumn("TTFT p50 ms", format="localized", width=95),
        "tpot": config.NumberColumn("TPOT p50 ms", format="localized", width=95),
        "duration": config.NumberColumn(
            "Duration s",
            format="localized",
            width=85,
            help="From the first arrival to the last delivery; of a lab's run, from when its work began to its end.",
        ),
        "note": config.TextColumn("Cause or notes", width=260),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
