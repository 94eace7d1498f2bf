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
_QUANTILES = ("p50", "p99")
_LATENCIES = tuple(f"{name}.{q}" for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms") for q in _QUANTILES)
_SWAPPED = ("preemptions_swapped", "swapped_out_bytes", "swapped_in_bytes")
_SPECULATION = ("draft_acceptance_rate", "mean_acceptance_length")
_REST = ("kv_cache_usage_max", "preemptions", *_SWAPPED, *_SPECULATION, "peak_memory_bytes")


def print_summaries(summaries: Mapping[int, Mapping[str, Any]], out: TextIO) -> None:
    """A row per metric that any run has, a column per run (by run id)."""
    rows = []

    def add(label: str, name: str, values: list[float | None]) -> None:
        if any(value is not None for value in values):
            rows.append((label, *(formatting.metric(name, value) for value in values)))

    for name in (*_PLAIN, *_LATENCIES):
        add(formatting.metric_label(name), name, [metric_value(summary, name) for summary in summaries.values()])
    by_priority = [summary.get("ttft_ms_by_priority") or {} for summary in summaries.values()]
    for priority in sorted({int(number) for classes in by_priority for number in classes}):
        for quantile in _QUANTILES:
            values = [metric_value(classes, f"{priority}.{quantile}") for classes in by_priority]
            add(f"TTFT of priority {priority}, {quantile}", "ttft_ms", values)
    for name in _REST:
        add(formatting.metric_label(name), name, [metric_value(summary, name) for summary in summaries.values()])
    terminal.print_table(("Metric", *(f"#{run_id}" for run_id in summaries)), rows, "lr", out)
