"""The table of headline figures that `run` ends with and `runs show` repeats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from app import formatting, terminal
from backend.experiments.compare import metric_value

_PLAIN = (
    "num_requests",
    "num_failed",
    "duration_s",
    "input_tokens",
    "output_tokens",
    "output_throughput_tok_s",
    "total_throughput_tok_s",
    "request_throughput_req_s",
    "goodput_req_s",
)
_LATENCIES = tuple(f"{name}.{q}" for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms") for q in ("p50", "p99"))
_REST = ("kv_cache_usage_max", "preemptions", "peak_memory_bytes")


def print_summaries(summaries: Mapping[int, Mapping[str, Any]], out: TextIO) -> None:
    """A row per metric that any run has, a column per run (by run id)."""
    rows = []
    for name in (*_PLAIN, *_LATENCIES, *_REST):
        values = [metric_value(summary, name) for summary in summaries.values()]
        if any(value is not None for value in values):
            rows.append((formatting.metric_label(name), *(formatting.metric(name, value) for value in values)))
    terminal.print_table(("Metric", *(f"#{run_id}" for run_id in summaries)), rows, "lr", out)
