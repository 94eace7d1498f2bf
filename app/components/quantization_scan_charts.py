"""The pictures of what scans of a variant have found, from their stored results. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from app.components import palette
from app.components.quantization_charts import log_ticks, titled
from app.quantization_texts import KIND_TITLES, place_text
from backend.experiments.ranges import Range

Row = Mapping[str, Any]

VARIANT, REST, ORIGINAL = "largest", "99.9 %", "largest in the original"
REACH_COLOURS = {VARIANT: "#0072B2", REST: "#56B4E9", ORIGINAL: palette.BASELINE}
_ALL_TITLE = "All of them"
_LAYERS_HEIGHT = 240
_FEW_DECADES = 30  # up to this ratio an axis has more ticks than powers of ten


def by_kind(rows: Sequence[Row]) -> alt.LayerChart:
    """What each kind of layer costs alone, and all of them together."""
    data = pd.DataFrame(
        [(KIND_TITLES.get(row["part"], _ALL_TITLE), row["kl_mean"], row["num_layers"]) for row in rows],
        columns=["part", "kl", "layers"],
    )
    base = alt.Chart(data).encode(
        y=alt.Y("part:N", title=None, sort=list(data["part"]), axis=alt.Axis(labelLimit=180, ticks=False)),
        x=alt.X(
            "kl:Q", title="KL, nats", scale=alt.Scale(zero=True, nice=True), axis=alt.Axis(format="~g", tickCount=5)
        ),
    )
    bars = base.mark_bar().encode(
        color=alt.condition(
            f"datum.part == '{_ALL_TITLE}'", alt.value(palette.BASELINE), alt.value(REACH_COLOURS[VARIANT])
        ),
        tooltip=[
            alt.Tooltip("part:N", title="Quantized alone"),
            alt.Tooltip("kl:Q", title="KL, nats", format=",.4~g"),
            alt.Tooltip("layers:Q", title="Layers"),
        ],
    )
    values = base.mark_text(align="left", dx=4, color=palette.BASELINE).encode(text=alt.Text("kl:Q", format=",.3~g"))
    return titled(
        alt.LayerChart(layer=[bars, values]), "One kind of layer quantized, the others as they are", height=200
    )


def by_layer(cells: Sequence[Row]) -> alt.LayerChart:
    """A cell for each linear layer: what it costs alone, on a logarithmic scale. A layer that costs nothing is left blank.

    Args:
        cells: `layer`, `kind` and `kl_mean` of each.
    """
    costs = [cell["kl_mean"] for cell in cells if cell["kl_mean"] > 0] or [1e-6, 1.0]
    data = pd.DataFrame(
        [
            {
                "layer": cell["layer"],
                "kind": KIND_TITLES[cell["kind"]],
                "kl": cell["kl_mean"],
                "shown": cell["kl_mean"] if cell["kl_mean"] > 0 else None,
            }
            for cell in cells
        ],
        columns=["layer", "kind", "kl", "shown"],
    )
    marks = (
        alt.Chart(data)
        .mark_rect()
        .encode(
            x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap="greedy", ticks=False)),
            y=alt.Y(
                "kind:N",
                title=None,
                sort=list(KIND_TITLES.values()),
                axis=alt.Axis(labelLimit=150, labelOverlap=False, ticks=False),
            ),
            color=alt.Color(
                "shown:Q",
                scale=alt.Scale(type="log", domain=[min(costs), max(costs)], scheme="viridis"),
                legend=alt.Legend(
                    title=None, orient="bottom", format=".2~g", gradientLength=180, tickCount=2, offset=2
                ),
            ),
            tooltip=[
                alt.Tooltip("kind:N", title="Kind"),
                alt.Tooltip("layer:O", title="Layer"),
                alt.Tooltip("kl:Q", title="KL, nats", format=",.4~g"),
            ],
        )
    )
    return titled(
        alt.LayerChart(layer=[marks]), "One layer quantized, the others as they are", "KL, nats (log)", _LAYERS_HEIGHT
    )


def reach(group: str, variant: Sequence[Range], original: Sequence[Range]) -> alt.LayerChart:
    """How far a group's values reach in each layer, in the variant and in the original.

    Args:
        variant, original: of each layer the place that reaches furthest.
    """
    rows = [
        {"layer": each.layer, "series": series, "value": value, "place": place_text(each)}
        for series, ranges in ((ORIGINAL, original), (VARIANT, variant), (REST, variant))
        for each in ranges
        if (value := each.p999 if series == REST else each.max_abs) > 0
    ]
    data = pd.DataFrame(rows, columns=["layer", "series", "value", "place"])
    values = [row["value"] for row in rows] or [1.0]
    domain = (min(values) / 1.5, max(values) * 1.5)
    digits = (1, 2, 5) if domain[1] / domain[0] <= _FEW_DECADES else (1,)
    base = alt.Chart(data).encode(
        x=alt.X(
            "layer:Q",
            title="layer",
            scale=alt.Scale(nice=False),
            axis=alt.Axis(grid=False, tickMinStep=1, tickCount=8, format="d"),
        ),
        y=alt.Y(
            "value:Q",
            title="absolute value (log)",
            scale=alt.Scale(type="log", domain=list(domain), nice=False),
            axis=alt.Axis(format="~g", values=log_ticks(domain, digits)),
        ),
        color=alt.Color(
            "series:N",
            scale=alt.Scale(domain=list(REACH_COLOURS), range=list(REACH_COLOURS.values())),
            legend=alt.Legend(title=None, orient="bottom", symbolType="stroke", offset=2, columns=3),
        ),
    )
    dash = alt.StrokeDash(
        "series:N", scale=alt.Scale(domain=list(REACH_COLOURS), range=[[1, 0], [1, 0], [4, 3]]), legend=None
    )
    points = base.mark_point(filled=True, size=60, opacity=0).encode(
        tooltip=[
            alt.Tooltip("place:N", title="Where"),
            alt.Tooltip("series:N", title="Shown"),
            alt.Tooltip("value:Q", title="Value", format=",.4~g"),
        ]
    )
    chart = alt.LayerChart(layer=[base.mark_line(strokeWidth=2, tooltip=None).encode(strokeDash=dash), points])
    return titled(chart, group[0].upper() + group[1:], height=230)
