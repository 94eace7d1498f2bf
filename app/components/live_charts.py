"""The pictures of a run under way, from the points of its live series. Pure.

A picture is a spec that never changes and rows that do. Building a chart takes Altair tens of milliseconds, in which the
engine, in the same interpreter, would stand still: the spec is built once per process, and a look costs the rows only.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from statistics import fmean as mean
from typing import Any, NamedTuple

import pandas as pd

from app.components import palette
from app.components.chart_rows import Point, axis_end, line_rows
from app.components.charts import line_chart, spec_without_data
from backend.metrics.live import RATE_WINDOW_S
from backend.metrics.series import LivePoint

TIME = "seconds since start"

_ROOM = 1.15  # the time axis ends so much later than the data, so that it need not grow at every look
_SHORTEST_S = 10.0

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

    data: pd.DataFrame
    spec: dict[str, Any]


def throughput(series: Sequence[LivePoint]) -> Picture:
    """Rates as means over the window that the headline figure uses: a point by itself is one or two steps."""
    window = [_before(series, place) for place in range(len(series))]
    return _picture(
        "throughput",
        series,
        {
            "output": lambda place: mean(point.output_tok_s for point in window[place]),
            "input": lambda place: mean(point.input_tok_s for point in window[place]),
        },
    )


def requests(series: Sequence[LivePoint]) -> Picture:
    return _picture(
        "requests",
        series,
        {"running": lambda place: series[place].running, "waiting": lambda place: series[place].waiting},
    )


def kv_usage(series: Sequence[LivePoint]) -> Picture:
    return _picture("kv_usage", series, {"in use": lambda place: series[place].kv_cache_usage}, y_end=1.0)


def _picture(
    name: str, series: Sequence[LivePoint], values: dict[str, Callable[[int], float]], y_end: float | None = None
) -> Picture:
    points = [
        Point(line, point.time_s, value(place)) for line, value in values.items() for place, point in enumerate(series)
    ]
    x_end = axis_end(max(_SHORTEST_S, _ROOM * series[-1].time_s)) if series else _SHORTEST_S
    # Read anew each time: Streamlit writes into the spec it is given.
    return Picture(line_rows(points, _COLOURS[name], x_end=x_end, y_end=y_end), json.loads(_spec(name)))


@functools.cache
def _spec(name: str) -> str:
    colours = _COLOURS[name]
    return spec_without_data(line_chart(line_rows([], colours), colours, x_title=TIME, **_STYLES[name]))


def _before(series: Sequence[LivePoint], place: int) -> Sequence[LivePoint]:
    """The points of the window that ends with this one, itself included."""
    first = bisect_right(series, series[place].time_s - RATE_WINDOW_S, key=lambda point: point.time_s)
    return series[min(first, place) : place + 1]
