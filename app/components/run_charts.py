"""The pictures of stored runs, from their request and step rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import altair as alt
import numpy as np

from app.components import palette
from app.components.chart_rows import Point
from app.components.charts import ecdf, lines, stacked

Row = Mapping[str, Any]

TIME = "seconds since start"
LATENCIES = {
    "ttft_ms": "Time to first token (TTFT)",
    "tpot_ms": "Time per output token (TPOT)",
    "itl_ms": "Inter-token latency (ITL)",
    "e2el_ms": "End-to-end latency (E2EL)",
}
MAX_STEPS = 300  # points of a chart over time; the database thins longer runs
_BINS = 100


def latencies(requests: Iterable[Row], metric: str) -> list[float]:
    """One metric's sample, as the summary takes it: measured requests that finished."""
    measured = [row for row in requests if not row["warmup"] and row["status"] == "finished"]
    if metric == "itl_ms":
        return [(later - earlier) * 1e3 for row in measured for earlier, later in pairwise(row["emission_times"])]
    return [row[metric] for row in measured if row[metric] is not None]


def latency(samples: Mapping[str, Sequence[float]], colours: Mapping[str, str], metric: str) -> alt.LayerChart:
    """Distribution of one metric, a staircase per run."""
    return ecdf(samples, colours, title=LATENCIES[metric], unit="ms")


def throughput(steps: Sequence[Row]) -> alt.LayerChart:
    points = [Point("output", time, rate) for time, rate in rates(steps, "num_output_tokens")]
    points += [Point("input", time, rate) for time, rate in rates(steps, "num_prefill_tokens")]
    return lines(
        points,
        {"output": palette.DECODE, "input": palette.PREFILL},
        title=_throughput_title(steps),
        x_title=TIME,
        y_title="tok/s",
    )


def batch_composition(steps: Sequence[Row]) -> alt.LayerChart:
    """Prefill and decode tokens of a step; of thinned runs, the mean over neighbouring steps."""
    points = []
    for row in steps:
        start = row["end_time"] - row["duration_ms"] * row["num_steps"] / 1e3
        points.append(Point("decode", start, row["num_decode_tokens"] / row["num_steps"]))
        points.append(Point("prefill", start, row["num_prefill_tokens"] / row["num_steps"]))
    return stacked(
        points,
        {"prefill": palette.PREFILL, "decode": palette.DECODE},
        title="Tokens per step",
        x_title=TIME,
        y_title="tokens",
    )


def queue(steps: Sequence[Row]) -> alt.LayerChart:
    points = [Point("running", row["end_time"], row["num_running"]) for row in steps]
    points += [Point("waiting", row["end_time"], row["num_waiting"]) for row in steps]
    return lines(
        points,
        {"running": palette.IN_USE, "waiting": palette.WAITING},
        title="Requests",
        x_title=TIME,
        y_title="requests",
        dashed=("waiting",),
        steps=True,
        whole=True,
    )


def kv_usage(steps: Sequence[Row]) -> alt.LayerChart:
    return lines(
        [Point("in use", row["end_time"], row["kv_cache_usage"]) for row in steps],
        {"in use": palette.IN_USE},
        title="KV cache in use",
        x_title=TIME,
        y_title="share of blocks",
        y_end=1.0,
        y_format=".0%",
        filled=True,
    )


def overlaid(
    steps: Mapping[str, Sequence[Row]], colours: Mapping[str, str], field: str, *, title: str, y_title: str
) -> alt.LayerChart:
    """One figure over time, a line per run, each from its own start: a rate for token counts, else the value itself."""
    points = []
    for name, rows in steps.items():
        if field.endswith("_tokens"):
            points += [Point(name, time, rate) for time, rate in rates(rows, field)]
        else:
            points += [Point(name, row["end_time"], row[field]) for row in rows]
    is_share = field == "kv_cache_usage"
    options: dict[str, Any] = {"y_end": 1.0, "y_format": ".0%"} if is_share else {"whole": True}
    is_gauge = not field.endswith("_tokens")
    return lines(points, colours, title=title, x_title=TIME, y_title=y_title, steps=is_gauge, **options)


def rates(steps: Sequence[Row], field: str) -> list[tuple[float, float]]:
    """(time, tokens per second) over equal intervals; tokens count evenly over the step, or steps, that made them.

    An interval holds two steps at least on average, so that the picture is not one of single steps.
    """
    if not steps:
        return []
    ends = np.array([row["end_time"] for row in steps])
    start = ends[0] - steps[0]["duration_ms"] * steps[0]["num_steps"] / 1e3
    total = np.concatenate([[0.0], np.cumsum([row[field] for row in steps])])
    num_bins = _num_bins(steps)
    edges = np.linspace(start, ends[-1], num_bins + 1)
    width = edges[1] - edges[0]
    if width <= 0:
        return []
    made = np.diff(np.interp(edges, np.concatenate([[start], ends]), total))
    return [(float(edge), float(tokens / width)) for edge, tokens in zip(edges[1:], made, strict=True)]


def _num_bins(steps: Sequence[Row]) -> int:
    return int(min(_BINS, max(1, sum(row["num_steps"] for row in steps) // 2)))


def _throughput_title(steps: Sequence[Row]) -> str:
    if len(steps) < 2:
        return "Throughput"
    width = (steps[-1]["end_time"] - steps[0]["end_time"]) / _num_bins(steps)
    return f"Throughput, mean over {width:.2g} s"
