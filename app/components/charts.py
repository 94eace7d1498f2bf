"""Charts as pure functions: data in, an Altair chart out. No Streamlit, no cache: a chart belongs to one rendering.

A chart's spec depends on what is drawn, never on how far it has got: axes that grow ride on the data as an invisible frame.
So a live chart can keep its spec, change its data only, and does not flicker.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from app.components.chart_rows import Point, axis_end, ecdf_points, has_direct_labels, line_rows, stacked_rows

HEIGHT = 250
NUMBER = ",.12~g"  # d3: all digits there are, thousands separated

_EXACT = ",.4~g"
_X_AXIS = {"grid": False, "tickCount": 6}


def lines(
    points: Sequence[Point],
    colours: Mapping[str, str],
    *,
    x_end: float | None = None,
    y_end: float | None = None,
    **style: Any,
) -> alt.LayerChart:
    """`line_chart` of these points; see there for `style`, and `line_rows` for the rest."""
    return line_chart(line_rows(points, colours, x_end=x_end, y_end=y_end), colours, **style)


def line_chart(
    data: pd.DataFrame,
    colours: Mapping[str, str],
    *,
    title: str,
    x_title: str,
    y_title: str,
    y_format: str = NUMBER,
    dashed: Collection[str] = (),
    steps: bool = False,
    filled: bool = False,
    whole: bool = False,
) -> alt.LayerChart:
    """One line per series, named at its end (few) or in a legend (many).

    Args:
        data: from `line_rows`.
        colours: series -> colour, in the order of the legend. Series without points keep their place.
        dashed: series whose line is dashed.
        steps: draw stairs, each value holding until the next.
        filled: fill the area under each line.
        whole: y counts things: no ticks between whole numbers.
    """
    direct = has_direct_labels(colours)
    y_axis = alt.Axis(tickCount=4, format=y_format, tickMinStep=1 if whole else alt.Undefined)
    x = alt.X("x:Q", title=x_title, axis=alt.Axis(**_X_AXIS), scale=alt.Scale(nice=False, zero=True))
    y = alt.Y("y:Q", title=y_title, axis=y_axis, scale=alt.Scale(nice=False, zero=True))
    needs_legend = len(colours) > 1 and not direct
    colour = _colour(colours, _legend() if needs_legend else None)
    dashes = [[5, 3] if name in dashed else [1, 0] for name in colours]
    dash = alt.StrokeDash("series:N", scale=alt.Scale(domain=list(colours), range=dashes), legend=None)
    curve = "step-after" if steps else "linear"
    base = alt.Chart(data)
    line = base.transform_filter("datum.kind == 'line'")
    hover = alt.selection_point(name="hover", nearest=True, on="pointermove", clear="pointerout", empty=False)
    layers = [
        base.transform_filter("datum.kind == 'frame'").mark_point(opacity=0, tooltip=None).encode(x=x, y=y),
        line.mark_line(interpolate=curve, strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash),
        # Named, as Altair would count a name up at every rendering, and the spec would never be the same.
        line.mark_point(filled=True, size=60)
        .properties(name="points")
        .encode(
            x=x,
            y=y,
            color=colour,
            opacity=alt.condition(hover, alt.value(1), alt.value(0)),
            tooltip=_tooltip(x_title, y_title, y_format if "%" in y_format else _EXACT),
        )
        .add_params(hover),
        base.transform_filter("datum.kind == 'label'")
        .mark_text(align="left", dx=6, fontSize=12, fontWeight=600)
        .encode(x=x, y=y, text="label:N", color=colour),
    ]
    if filled:
        under = alt.Y("y:Q", stack=None, title=y_title)
        layers.insert(1, line.mark_area(interpolate=curve, opacity=0.25, line=False).encode(x=x, y=under, color=colour))
    return _titled(alt.LayerChart(layer=layers), title, room_for_names=direct or needs_legend)


def stacked(
    points: Sequence[Point], colours: Mapping[str, str], *, title: str, x_title: str, y_title: str
) -> alt.LayerChart:
    """Series on top of each other as stairs; `points` hold every series at the same x."""
    chart = (
        alt.Chart(stacked_rows(points, colours))
        .mark_area(interpolate="step-after")
        .encode(
            x=alt.X("x:Q", title=x_title, axis=alt.Axis(**_X_AXIS), scale=alt.Scale(nice=False, zero=True)),
            y=alt.Y("y:Q", title=y_title, stack="zero", axis=alt.Axis(tickCount=4, format=NUMBER)),
            color=_colour(colours, _legend()),
            order="order:O",
            tooltip=_tooltip(x_title, y_title, _EXACT),
        )
    )
    return _titled(alt.LayerChart(layer=[chart]), title, room_for_names=True)


def ecdf(
    samples: Mapping[str, Sequence[float]], colours: Mapping[str, str], *, title: str, unit: str
) -> alt.LayerChart:
    """Share of values at or below x, one staircase per sample. Empty samples keep their colour and draw nothing."""
    points = [Point(name, x, y) for name in colours for x, y in ecdf_points(samples.get(name, ()))]
    end = axis_end(max((point.x for point in points), default=1.0))
    # A finished staircase goes on at 100 %, so that a short one beside a long one does not look cut off.
    points += [Point(name, end, 1.0) for name in colours if samples.get(name)]
    return lines(
        points,
        colours,
        x_end=end,
        y_end=1.0,
        title=title,
        x_title=unit,
        y_title="share at or below",
        y_format=".0%",
        steps=True,
    )


def spec_without_data(chart: alt.LayerChart) -> str:
    """A chart's Vega-Lite spec as JSON, to be drawn with other data of the same columns."""
    spec = chart.to_dict()
    del spec["data"], spec["datasets"]
    return json.dumps(spec)


def _legend() -> alt.Legend:
    """In the title's line, where it takes nothing from the picture."""
    return alt.Legend(title=None, orient="top-right", direction="horizontal", offset=-30)


def _colour(colours: Mapping[str, str], legend: alt.Legend | None) -> alt.Color:
    return alt.Color("series:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())), legend=legend)


def _tooltip(x_title: str, y_title: str, y_format: str) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("series:N", title=" "),
        alt.Tooltip("x:Q", title=x_title, format=_EXACT),
        alt.Tooltip("y:Q", title=y_title, format=y_format),
    ]


def _titled(chart: alt.LayerChart, title: str, *, room_for_names: bool) -> alt.LayerChart:
    heading = alt.Title(title, anchor="start", fontSize=14, fontWeight=600, offset=10)
    # Names stand right of the last point, outside the plot when the line reaches its end.
    padding = {"left": 5, "top": 5, "bottom": 5, "right": 70 if room_for_names else 12}
    return chart.properties(title=heading, height=HEIGHT, padding=padding)
