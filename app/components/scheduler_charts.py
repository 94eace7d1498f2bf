"""The pictures of the Scheduler page: requests over time, and beneath them what each step was made of. Pure.

Specs are built once per process and height: a look at a run that goes on costs the rows only, as in `live_charts`. All
charts of a column keep the same room left of the plot, so that their time axes are one.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import altair as alt
import pandas as pd

from app.components import palette
from app.components.charts import NUMBER, spec_without_data
from app.components.live_charts import Picture
from app.components.scheduler_rows import OWN

PICK = "pick"  # selection of a request
ZOOM = "zoom"  # selection of a stretch of time

TOKENS_HEIGHT, TIME_HEIGHT = 190, 140

_STEP_COLOURS = {OWN: palette.IN_USE, **{kind: palette.SPANS[kind] for kind in ("prefill", "decode", "recompute")}}
_MANY = 100  # requests, between which there is no room for a line
_ROW = 13  # pixels of a request, where there is room
_HEIGHTS = (180, 520)
_LEFT, _WIDE_LEFT = 44, 136  # pixels for labels of the y axis


def gantt_height(num_rows: int) -> int:
    return min(max(_HEIGHTS[0], 90 + _ROW * num_rows), _HEIGHTS[1])


def gantt(rows: pd.DataFrame, title: str, x_title: str, *, height: int, pick: bool) -> Picture:
    """A line per request. With `pick`, clicking a bar selects its `request_id`."""
    return _picture(rows, _gantt(height, pick, len(set(rows["row"])) > _MANY), title, x_title)


def step_tokens(rows: pd.DataFrame, title: str, x_title: str, *, zoom: bool = False, wide: bool = False) -> Picture:
    """Tokens of each step by kind. With `zoom`, dragging over it selects a stretch of time."""
    return _picture(rows.query("part != 'time'"), _steps("tokens", zoom, wide), title, x_title)


def step_time(rows: pd.DataFrame, title: str, x_title: str) -> Picture:
    return _picture(rows.query("part != 'tokens'"), _steps("time", False, False), title, x_title)


def waterfall(rows: pd.DataFrame, title: str, x_title: str) -> Picture:
    """A stair per span, each named on the left with its tokens and how long it took."""
    num_bars = len(rows.query("part == 'bar'"))
    return _picture(rows, _waterfall(max(120, 92 + 19 * num_bars)), title, x_title)


def _picture(rows: pd.DataFrame, spec: str, title: str, x_title: str) -> Picture:
    read = json.loads(spec)  # anew each time: Streamlit writes into the spec it is given
    read["title"]["text"] = title
    for layer in read["layer"]:
        if "title" in layer["encoding"]["x"]:
            layer["encoding"]["x"]["title"] = x_title or None
    return Picture(rows, read)


def _x(**axis: Any) -> alt.X:
    return alt.X("x:Q", title="x", axis=alt.Axis(tickCount=6, **axis), scale=alt.Scale(nice=False, zero=False))


def _y_axis(left: int, **axis: Any) -> alt.Axis:
    return alt.Axis(minExtent=left, maxExtent=left, **axis)


def _colour(colours: dict[str, str]) -> alt.Color:
    return alt.Color("kind:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())), legend=None)


def _frame(base: alt.Chart) -> alt.Chart:
    return base.transform_filter("datum.part == 'frame'").mark_point(opacity=0, tooltip=None).encode(x=_x(grid=True))


def _tooltip(*fields: tuple[str, str]) -> list[alt.Tooltip]:
    return [alt.Tooltip(field, title=title) for field, title in fields]


_SPAN_TIP = (("what:N", " "), ("took:N", "time"), ("steps:N", "steps"))


@functools.cache
def _gantt(height: int, pick: bool, dense: bool) -> str:
    columns = ["part", "row", "request_id", "faint", "x", "x2", "kind", "took", "steps", "tokens", "what"]
    base = alt.Chart(pd.DataFrame(columns=columns))
    bars = base.transform_filter("datum.part == 'bar'")
    y = alt.Y(
        "row:O",
        title="request",
        sort=None,
        axis=_y_axis(_LEFT, labelOverlap="greedy", labelLimit=_LEFT, ticks=False, domain=False),
        scale=alt.Scale(paddingInner=0 if dense else 0.12, paddingOuter=0.1),
    )
    spans = (
        bars.mark_bar(cursor="pointer" if pick else alt.Undefined)
        .properties(name="spans")
        .encode(
            x=_x(grid=True),
            x2="x2:Q",
            y=y,
            color=_colour(palette.SPANS),
            opacity=alt.condition("datum.faint", alt.value(0.45), alt.value(1)),
            tooltip=[
                alt.Tooltip("row:N", title="request"),
                *_tooltip(*_SPAN_TIP),
                alt.Tooltip("tokens:Q", title="tokens", format=NUMBER),
                alt.Tooltip("x:Q", title="from, s", format=",.4~f"),
            ],
        )
    )
    if pick:
        spans = spans.add_params(alt.selection_point(name=PICK, fields=["request_id"], on="click", toggle=False))
    return _finished(alt.LayerChart(layer=[_frame(base), spans]), height)


@functools.cache
def _steps(part: str, zoom: bool, wide: bool) -> str:
    base = alt.Chart(pd.DataFrame(columns=["part", "kind", "x", "x2", "y", "y2", "tokens", "steps"]))
    y_title, height = ("tokens", TOKENS_HEIGHT) if part == "tokens" else ("ms", TIME_HEIGHT)
    y = alt.Y(
        "y:Q",
        title=y_title,
        axis=_y_axis(_WIDE_LEFT if wide else _LEFT, tickCount=3, format=NUMBER),
        scale=alt.Scale(zero=True),
    )
    tip = [alt.Tooltip("steps:N", title="step")]
    bars = base.transform_filter(f"datum.part == '{part}'")
    if part == "tokens":
        tip += [alt.Tooltip("kind:N", title=" "), alt.Tooltip("tokens:Q", title="tokens per step", format=",.4~g")]
        marks = bars.mark_bar().encode(color=_colour(_STEP_COLOURS))
    else:
        tip.append(alt.Tooltip("y2:Q", title="ms", format=",.4~g"))
        marks = bars.mark_bar(color=palette.BASELINE)
    marks = marks.properties(name="steps").encode(x=_x(grid=True), x2="x2:Q", y=y, y2="y2:Q", tooltip=tip)
    if zoom:
        marks = marks.add_params(alt.selection_interval(name=ZOOM, encodings=["x"]))
    return _finished(alt.LayerChart(layer=[_frame(base), marks]), height)


@functools.cache
def _waterfall(height: int) -> str:
    base = alt.Chart(pd.DataFrame(columns=["part", "row", "x", "x2", "kind", "took", "steps", "tokens", "what"]))
    spans = base.transform_filter("datum.part == 'bar'")
    axis = _y_axis(_WIDE_LEFT, labelLimit=_WIDE_LEFT, ticks=False, domain=False)
    y = alt.Y("row:O", title="span", sort=None, axis=axis, scale=alt.Scale(paddingInner=0.2))
    tip = [*_tooltip(*_SPAN_TIP), alt.Tooltip("tokens:Q", title="tokens", format=NUMBER)]
    bars = spans.mark_bar().encode(x=_x(grid=True), x2="x2:Q", y=y, color=_colour(palette.SPANS), tooltip=tip)
    return _finished(alt.LayerChart(layer=[_frame(base), bars.properties(name="spans")]), height)


def _finished(chart: alt.LayerChart, height: int) -> str:
    heading = alt.Title("title", anchor="start", fontSize=14, fontWeight=600, offset=8)
    padding = {"left": 5, "top": 5, "bottom": 5, "right": 12}
    return spec_without_data(chart.properties(title=heading, height=height, padding=padding))
