"""What KV slots were held for over a run: areas on top of each other, a rule at the step that is shown. Pure.

Specs are built once per process and set of areas: a look at a run that goes on costs the rows only, as in `live_charts`. A
point holds until the next one, which in a thinned run need not be the next step.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import altair as alt
import pandas as pd

from app.components import palette
from app.components.chart_rows import axis_end
from app.components.charts import NUMBER, spec_without_data
from app.components.live_charts import Picture
from backend.metrics.kv_use import KVUse
from backend.metrics.waste_history import WastePoint, WasteSlots

HEIGHT = 230
PARTS = (  # from below: what of `KVUse` and `WasteSlots` it is, its name, its colour
    ("num_used_slots", "with a token", palette.IN_USE),
    ("num_unused_slots", "unused in last blocks", palette.WAITING),
    ("num_reserved_slots", "in empty blocks", palette.FREE),
    ("num_passed_slots", "behind the window", palette.CACHED),
    ("num_unusable_slots", "free, but too few for a request", palette.BASELINE),
)

_UNSHARED = "without sharing"
_COLUMNS = ("kind", "x", "y", "step", "wasted", "requests", _UNSHARED)
# On areas of all colours, and beside them on light and dark.
_MARK, _MARK_EDGE = "#11161D", "#FFFFFF"


def parts_of(slots: KVUse | WasteSlots) -> list[tuple[str, int, str]]:
    """Name, slots and colour of each part there is."""
    parts = [(label, getattr(slots, field), colour) for field, label, colour in PARTS]
    return [part for part in parts if part[1]]


def height_of(points: Sequence[WastePoint]) -> float:
    """Where the y axis ends that holds these points."""
    tops = [point.num_slots + max(point.num_unusable_slots, point.num_saved_slots) for point in points]
    return axis_end(max(tops, default=1))


def waste_chart(
    points: Sequence[WastePoint],
    x: Sequence[float],
    x_axis: tuple[float, float],
    y_end: float,
    mark: float | None,
    title: str,
    x_title: str,
) -> Picture:
    """Args:
    points: the steps to draw, in order.
    x: where each begins, and last where the last one ends.
    x_axis: from, to.
    mark: where the rule is; None: nowhere.
    """
    shown = [(field, label) for field, label, _ in PARTS if any(getattr(point, field) for point in points)]
    shares = any(point.num_saved_slots for point in points)
    labels = tuple(label for _, label in shown)
    rows = [
        {
            "kind": "point",
            "x": place,
            "step": point.step,
            "wasted": point.wasted_share,
            "requests": point.num_requests,
            _UNSHARED: point.num_slots + point.num_saved_slots,
            **{label: getattr(point, field) for field, label in shown},
        }
        for point, place in zip([*points, *points[-1:]], x, strict=True)
    ]
    rows += [{"kind": "frame", "x": x_axis[0], "y": 0.0}, {"kind": "frame", "x": x_axis[1], "y": y_end}]
    if mark is not None:
        rows.append({"kind": "mark", "x": mark})
    spec = json.loads(_spec(labels, shares, x_title))  # read anew each time: Streamlit writes into the spec it is given
    spec["title"]["text"] = title
    return Picture(pd.DataFrame(rows, columns=[*_COLUMNS, *labels]), spec)


@functools.cache
def _spec(labels: tuple[str, ...], shares: bool, x_title: str) -> str:
    base = alt.Chart(pd.DataFrame(columns=[*_COLUMNS, *labels]))
    points = base.transform_filter("datum.kind == 'point'")
    colours = [colour for _, label, colour in PARTS if label in labels]
    x = alt.X("x:Q", title=x_title, axis=alt.Axis(grid=False, tickCount=6), scale=alt.Scale(nice=False, zero=False))
    y_axis = alt.Axis(tickCount=4, format=NUMBER, tickMinStep=1)
    y = alt.Y("y:Q", title="KV slots", axis=y_axis, scale=alt.Scale(nice=False, zero=True))
    areas = (
        points.transform_fold(list(labels), ["part", "slots"])
        .transform_calculate(order=f"indexof({json.dumps(list(labels))}, datum.part)")
        .mark_area(interpolate="step-after", tooltip=None)
        .encode(
            x=x,
            y=alt.Y("slots:Q", title="KV slots", stack="zero", axis=y_axis),
            color=alt.Color("part:N", scale=alt.Scale(domain=list(labels), range=colours), legend=None),
            order="order:O",
        )
    )
    layers = [base.transform_filter("datum.kind == 'frame'").mark_point(opacity=0, tooltip=None).encode(x=x, y=y)]
    layers.append(areas)
    tip = [alt.Tooltip("step:Q", title="step", format=",d")]
    tip += [alt.Tooltip(f"{label}:Q", title=label, format=",d") for label in reversed(labels)]
    tip += [
        alt.Tooltip("wasted:Q", title="wasted", format=".1%"),
        alt.Tooltip("requests:Q", title="requests", format=",d"),
    ]
    if shares:
        line = points.mark_line(interpolate="step-after", strokeDash=[4, 3], strokeWidth=1.5, color=palette.BASELINE)
        layers.append(line.encode(x=x, y=alt.Y(f"{_UNSHARED}:Q", title="KV slots")))
        tip.insert(-1, alt.Tooltip(f"{_UNSHARED}:Q", title=_UNSHARED, format=",d"))
    hover = alt.selection_point(
        name="hover", nearest=True, on="pointermove", clear="pointerout", empty=False, encodings=["x"]
    )
    rule = base.transform_filter("datum.kind == 'mark'")
    layers += [
        rule.mark_rule(color=_MARK_EDGE, strokeWidth=4, opacity=0.85, tooltip=None).encode(x=x),
        rule.mark_rule(color=_MARK, strokeWidth=2, tooltip=None).encode(x=x),
        points.mark_rule(color=palette.BASELINE, strokeWidth=1)
        .properties(name="points")
        .encode(x=x, tooltip=tip, opacity=alt.condition(hover, alt.value(0.9), alt.value(0)))
        .add_params(hover),
    ]
    heading = alt.Title("title", anchor="start", fontSize=14, fontWeight=600, offset=10)
    padding = {"left": 5, "top": 5, "bottom": 5, "right": 12}
    return spec_without_data(alt.LayerChart(layer=layers).properties(title=heading, height=HEIGHT, padding=padding))
