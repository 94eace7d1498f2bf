"""The pictures of the quantization lab, from its stored results. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from app.components import palette
from app.quantization_texts import COLUMNS, KIND_TITLES
from backend.experiments.quantization_config import REFERENCE, variant_name
from backend.experiments.quantization_results import frontier

Row = Mapping[str, Any]

COSTS = ("weights_bytes", "bits_per_weight", "kv_bytes_per_token", "decode_1_tok_s", "decode_32_tok_s", "prefill_tok_s")
LOSSES = ("kl_mean", "perplexity")
_MIB = 2**20
_POINT = "#0072B2"
_HEAT_ROW = 22  # px of a heat map that a variant takes
_PARETO_HEIGHT = 400
_LABEL_STEP = 0.048  # of the height, between two names
_MANY_LEVELS = 40  # from here on lines would cover the bars


def pareto(rows: Sequence[Row], cost: str, loss: str) -> alt.LayerChart:
    """Every variant by what it takes and what it loses; a line through those that none beats in both."""
    known = [row for row in rows if row[cost] is not None and row[loss] is not None]
    on_log = loss == "kl_mean"
    if on_log:
        known = [row for row in known if row[loss] > 0]
    scale = 1 / _MIB if cost == "weights_bytes" else 1
    best = {row["variant"] for row in frontier([row for row in known if row["variant"] != REFERENCE], cost, loss)}
    xs = [row[cost] * scale for row in known] or [0.0, 1.0]
    ys = [row[loss] for row in known] or [1.0, 2.0]
    width = (max(xs) - min(xs)) or max(xs) or 1.0
    height = (max(ys) - min(ys)) or max(ys)
    domain = (min(ys) / 1.8, max(ys) * 1.8) if on_log else (min(ys) - 0.1 * height, max(ys) + 0.1 * height)
    sides = ["left" if row[cost] * scale > min(xs) + 0.6 * width else "right" for row in known]
    data = pd.DataFrame(
        [
            {
                "name": variant_name(row["variant"]),
                "x": row[cost] * scale,
                "y": row[loss],
                "kind": "reference" if row["variant"] == REFERENCE else "variant",
                "best": row["variant"] in best,
                "side": side,
                "label_y": label_y,
            }
            for row, side, label_y in zip(known, sides, _label_places(ys, sides, domain, on_log), strict=True)
        ],
        columns=["name", "x", "y", "kind", "best", "side", "label_y"],
    )
    x = alt.X(
        "x:Q",
        title=f"{COLUMNS[cost][0]}, MiB" if cost == "weights_bytes" else COLUMNS[cost][0],
        scale=alt.Scale(domain=[max(0.0, min(xs) - 0.12 * width), max(xs) + 0.12 * width], nice=False, zero=False),
        axis=alt.Axis(grid=False, tickCount=6),
    )
    y = alt.Y(
        "y:Q",
        title=COLUMNS[loss][0] + (" (log)" if on_log else ""),
        scale=alt.Scale(type="log" if on_log else "linear", domain=list(domain), nice=False),
        axis=alt.Axis(format="~g", values=log_ticks(domain)) if on_log else alt.Axis(tickCount=5, format="~g"),
    )
    base = alt.Chart(data)
    tooltip = [
        alt.Tooltip("name:N", title="Variant"),
        alt.Tooltip("x:Q", title=COLUMNS[cost][0], format=",.4~g"),
        alt.Tooltip("y:Q", title=COLUMNS[loss][0], format=",.4~g"),
    ]
    colour = alt.Color(
        "kind:N", scale=alt.Scale(domain=["variant", "reference"], range=[_POINT, palette.BASELINE]), legend=None
    )
    layers: list[alt.Chart] = [
        base.transform_filter("datum.best")
        .mark_line(color=palette.BASELINE, strokeDash=[4, 3], strokeWidth=1.5, tooltip=None)
        .encode(x=x, y=y, order="x:Q"),
        base.mark_point(filled=True, size=90)
        .encode(
            x=x, y=y, color=colour, opacity=alt.condition("datum.best", alt.value(1), alt.value(0.55)), tooltip=tooltip
        )
        .properties(name="variants"),
    ]
    style: dict[str, Any] = {"fontSize": 12, "color": palette.BASELINE, "tooltip": None}
    for side, place in (("right", {"align": "left", "dx": 8}), ("left", {"align": "right", "dx": -8})):
        names = base.transform_filter(f"datum.side == '{side}'").mark_text(**style, **place)
        layers.append(names.encode(x=x, y=alt.Y("label_y:Q"), text="name:N"))
    return titled(
        alt.LayerChart(layer=layers),
        "What it takes, and what it loses",
        "Dashed: no variant beats these in both",
        _PARETO_HEIGHT,
    )


def _label_places(ys: Sequence[float], sides: Sequence[str], domain: tuple[float, float], on_log: bool) -> list[float]:
    """Where the names of points stand: at their points, or spread around them where names on the same side would overlap."""
    to_line, back = (math.log, math.exp) if on_log else (float, float)
    step = (to_line(domain[1]) - to_line(domain[0])) * _LABEL_STEP
    places = [0.0] * len(ys)
    for side in set(sides):
        clusters: list[list[int]] = []
        for index in sorted((index for index in range(len(ys)) if sides[index] == side), key=lambda index: ys[index]):
            clusters.append([index])
            while len(clusters) > 1:
                middles = [sum(to_line(ys[each]) for each in cluster) / len(cluster) for cluster in clusters[-2:]]
                if middles[1] - middles[0] >= step * (len(clusters[-1]) + len(clusters[-2])) / 2:
                    break
                clusters[-2:] = [clusters[-2] + clusters[-1]]
        for cluster in clusters:
            middle = sum(to_line(ys[index]) for index in cluster) / len(cluster)
            for place, index in enumerate(cluster):
                places[index] = back(middle + step * (place - (len(cluster) - 1) / 2))
    return places


def log_ticks(domain: tuple[float, float], digits: Sequence[int] = (1, 2, 5)) -> list[float]:
    """The digits times the powers of ten within."""
    powers = range(math.floor(math.log10(domain[0])), math.ceil(math.log10(domain[1])) + 1)
    ticks = (digit * 10.0**power for power in powers for digit in digits)
    return [tick for tick in ticks if domain[0] <= tick <= domain[1]]


def heat_map(cells: Sequence[Row], kind: str, domain: tuple[float, float], *, legend: bool) -> alt.Chart:
    """The output error of each layer of a kind, for each variant. The colours of all kinds are on one scale.

    Args:
        legend: say what the colours stand for, which one of the pictures does for all.
    """
    names = list(dict.fromkeys(variant_name(cell["variant"]) for cell in cells))
    of_kind = [cell for cell in cells if cell["kind"] == kind]
    data = pd.DataFrame(
        [
            {
                "variant": variant_name(cell["variant"]),
                "layer": cell["layer"],
                "error": cell["output_error"],
                "weight_error": cell["weight_error"],
            }
            for cell in of_kind
        ],
        columns=["variant", "layer", "error", "weight_error"],
    )
    return (
        alt.Chart(data)
        .mark_rect()
        .encode(
            x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap="greedy", ticks=False)),
            y=alt.Y(
                "variant:N",
                title=None,
                sort=names,
                axis=alt.Axis(labelLimit=130, labelOverlap=False, labelFontSize=11, ticks=False),
            ),
            color=alt.Color(
                "error:Q",
                scale=alt.Scale(type="log", domain=list(domain), scheme="viridis", clamp=True),
                legend=alt.Legend(title=None, orient="bottom", format=".2~%", gradientLength=180, tickCount=4, offset=2)
                if legend
                else None,
            ),
            tooltip=[
                alt.Tooltip("variant:N", title="Variant"),
                alt.Tooltip("layer:O", title="Layer"),
                alt.Tooltip("error:Q", title="Error of the output", format=".3%"),
                alt.Tooltip("weight_error:Q", title="of the weights", format=".3%"),
            ],
        )
        .properties(
            title=alt.Title(KIND_TITLES[kind], anchor="start", fontSize=13, fontWeight=600, offset=6),
            height=alt.Step(_HEAT_ROW),
            padding={"left": 5, "top": 5, "bottom": 5, "right": 8},
        )
    )


def error_domain(cells: Sequence[Row]) -> tuple[float, float]:
    """Of the colours: from the least error above 0 to the largest."""
    errors = [cell["output_error"] for cell in cells if cell["output_error"]]
    return (min(errors), max(errors)) if errors else (0.001, 1.0)


def histogram(
    edges: Sequence[float], counts: Sequence[int], levels: Sequence[float], *, title: str, x_title: str
) -> alt.LayerChart:
    """Weights in bars, and the values that the method has: lines, or ticks below where there are many."""
    bars = pd.DataFrame({"start": edges[:-1], "end": edges[1:], "count": counts})
    x = alt.X(
        "start:Q",
        bin="binned",
        title=x_title,
        scale=alt.Scale(nice=False, zero=False),
        axis=alt.Axis(grid=False, tickCount=8),
    )
    weights = (
        alt.Chart(bars)
        .mark_bar(color=palette.CACHED, binSpacing=0)
        .encode(
            x=x,
            x2="end:Q",
            y=alt.Y("count:Q", title="weights", axis=alt.Axis(tickCount=4, format="~s")),
            tooltip=[
                alt.Tooltip("start:Q", title="from", format=",.4~g"),
                alt.Tooltip("end:Q", title="to", format=",.4~g"),
                alt.Tooltip("count:Q", title="weights", format=","),
            ],
        )
    )
    marks = alt.Chart(pd.DataFrame({"level": list(levels)}))
    place = alt.X("level:Q")
    if len(levels) <= _MANY_LEVELS:
        grid = marks.mark_rule(color=palette.DECODE, strokeWidth=1.5).encode(
            x=place, tooltip=[alt.Tooltip("level:Q", title="value of the grid", format=",.4~g")]
        )
    else:
        grid = marks.mark_tick(color=palette.DECODE, thickness=1, size=14).encode(
            x=place, y=alt.value("height"), tooltip=[alt.Tooltip("level:Q", title="value of the grid", format=",.4~g")]
        )
    return titled(
        alt.LayerChart(layer=[weights, grid.properties(name="grid")]),
        title,
        f"Orange: the {len(levels)} values of the grid",
    )


def titled(chart: alt.LayerChart, title: str, subtitle: str | None = None, height: int = 250) -> alt.LayerChart:
    """A chart of this height with its title, as all of the quantization lab have it."""
    heading = alt.Title(
        title,
        subtitle=subtitle or alt.Undefined,
        anchor="start",
        fontSize=14,
        fontWeight=600,
        subtitleColor=palette.BASELINE,
        offset=10,
    )
    return chart.properties(title=heading, height=height, padding={"left": 5, "top": 5, "bottom": 5, "right": 30})
