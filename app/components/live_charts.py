"""The pictures of a run under way, from the points of its live series. Pure.

A picture is a spec that never changes and rows that do. Building a chart takes Altair tens of milliseconds, in which the
engine, in the same interpreter, would stand still: the spec is built once per process, and a look costs the rows only. Those
are laid out column by column, as they are sent; pandas would take several times as long over so few. How many there are is
bounded by the series.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from app.components import palette
from app.components.chart_rows import Point, axis_end, has_direct_labels, label_rows, line_rows
from app.components.charts import line_chart, spec_without_data
from backend.metrics.live import RATE_WINDOW_S
from backend.metrics.series import LivePoint

TIME = "seconds since start"

_ROOM = 1.15  # the time axis ends so much later than the data, so that it need not grow at every look
_SHORTEST_S = 10.0

_FIELDS = attrgetter("time_s", "output_tok_s", "input_tok_s", "running", "waiting", "kv_cache_usage")
_COLOURS = {
    "throughput": {"output": palette.DECODE, "input": palette.PREFILL},
    "requests": {"running": palette.IN_USE, "waiting": palette.WAITING},
    "kv_usage": {"in use": palette.IN_USE},
}
_STYLES: dict[str, dict[str, Any]] = {
    "throughput": {"title": f"Throughput, mean over {RATE_WINDOW_S:g} s", "y_title": "tok/s"},
    "requests": {"title": "Requests", "y_title": "requests", "dashed": ("waiting",), "steps": True, "whole": True},
    "kv_usage": {"title": "KV cache in use", "y_title": "share of blocks", "y_format": ".0%", "filled": True},
}


class Picture(NamedTuple):
    """For `st.vega_lite_chart(*picture)`."""

    data: pd.DataFrame | pa.Table
    spec: dict[str, Any]


class Columns(NamedTuple):
    """The points of a series, float64 [num_points] each."""

    times: np.ndarray  # s since the run's start, rising
    output_tok_s: np.ndarray
    input_tok_s: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    kv_cache_usage: np.ndarray


def columns_of(series: Sequence[LivePoint]) -> Columns:
    return Columns(
        *np.array([_FIELDS(point) for point in series], dtype=np.float64).reshape(-1, len(Columns._fields)).T
    )


def throughput(columns: Columns) -> Picture:
    """Rates as means over the window that the headline figure uses: a point by itself is one or two steps."""
    times = columns.times
    # The points of the window that ends with each one, itself included.
    ends = np.arange(1, len(times) + 1)
    begins = np.minimum(np.searchsorted(times, times - RATE_WINDOW_S, side="right"), ends - 1)

    def mean(rates: np.ndarray) -> np.ndarray:
        sums = np.concatenate(([0.0], np.cumsum(rates)))
        return (sums[ends] - sums[begins]) / (ends - begins)

    return _picture("throughput", times, {"output": mean(columns.output_tok_s), "input": mean(columns.input_tok_s)})


def requests(columns: Columns) -> Picture:
    return _picture("requests", columns.times, {"running": columns.running, "waiting": columns.waiting})


def kv_usage(columns: Columns) -> Picture:
    return _picture("kv_usage", columns.times, {"in use": columns.kv_cache_usage}, y_end=1.0)


def _picture(name: str, times: np.ndarray, values: Mapping[str, np.ndarray], y_end: float | None = None) -> Picture:
    x_end = axis_end(max(_SHORTEST_S, _ROOM * float(times[-1]))) if len(times) else _SHORTEST_S
    # Read anew each time: Streamlit writes into the spec it is given.
    return Picture(_rows(times, values, _COLOURS[name], x_end, y_end), json.loads(_spec(name)))


def _rows(
    times: np.ndarray, values: Mapping[str, np.ndarray], colours: Mapping[str, str], x_end: float, y_end: float | None
) -> pa.Table:
    """`chart_rows.line_rows` of series that share their times."""
    if y_end is None:
        y_end = axis_end(max(float(value.max()) for value in values.values())) if len(times) else axis_end(1.0)
    rows: list[tuple] = [("frame", None, 0.0, 0.0, None), ("frame", None, x_end, y_end, None)]
    if has_direct_labels(colours) and len(times):
        ends = [Point(line, float(times[-1]), float(value[-1])) for line, value in values.items()]
        rows += label_rows(ends, colours, y_end)
    kinds, lines, x, y, labels = zip(*rows, strict=True)
    names = [pa.repeat(pa.scalar(line), len(times)) for line in values]
    num_points = len(times) * len(values)
    return pa.table(
        {
            "kind": pa.concat_arrays([pa.repeat(pa.scalar("line"), num_points), pa.array(kinds)]),
            "series": pa.concat_arrays([*names, pa.array(lines, pa.string())]),
            "x": np.concatenate((*[times] * len(values), x)),
            "y": np.concatenate((*values.values(), y)),
            "label": pa.concat_arrays([pa.nulls(num_points, pa.string()), pa.array(labels, pa.string())]),
        }
    )


@functools.cache
def _spec(name: str) -> str:
    colours = _COLOURS[name]
    return spec_without_data(line_chart(line_rows([], colours), colours, x_title=TIME, **_STYLES[name]))
