"""The pictures of the kernel lab, from its stored results. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from app import formatting
from app.components import palette
from app.components.chart_rows import Point
from app.components.charts import lines
from backend.experiments.kernel_graphs import DecodeStep

Row = Mapping[str, Any]

HEIGHT = 380
# Okabe–Ito, on light and dark.
OP_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C7A00", "#D55E00")
MAX_NAMED = 3  # ops whose names fit beside their points; more have a legend
IMPLEMENTATIONS = {"launch": "Triton kernel", "reference": "torch reference"}
ATTENTION_COLOURS = {
    "unfused": palette.BASELINE,
    "fused, torch": palette.PREFILL,
    "paged, ours": palette.DECODE,
    "paged reference": palette.DECODE,
}
_MARGIN = 2.5  # room around the points, as a factor
_OTHERS = "others"


def roofline(
    timings: Sequence[Row], *, read_gb_per_s: float, matmul_tflop_per_s: float, coloured: Sequence[str] = ()
) -> alt.LayerChart:
    """Each timing below the roof: what memory gives at its arithmetic intensity, or what matrix products reach.

    Timings without arithmetic have no place on a log axis and are left out.

    Args:
        coloured: ops that are told apart, no more than there are colours; the others are grey.
    """
    points = _roofline_points(timings)
    ridge = matmul_tflop_per_s * 1e3 / read_gb_per_s  # FLOP per byte
    low, high = _domain([*points["intensity"], ridge])
    roof = pd.DataFrame(
        [(x, min(matmul_tflop_per_s, read_gb_per_s * x / 1e3)) for x in (low, ridge, high)], columns=["x", "y"]
    )
    y_low, y_high = _domain(
        [*points["tflop_per_s"], matmul_tflop_per_s, min(matmul_tflop_per_s, read_gb_per_s * low / 1e3)]
    )
    x_scale = alt.Scale(type="log", domain=[low, high], nice=False)
    y_scale = alt.Scale(type="log", domain=[y_low, y_high], nice=False)
    x = alt.X("x:Q", scale=x_scale, title="FLOP per byte moved (log)", axis=_log_axis())
    y = alt.Y("y:Q", scale=y_scale, title="TFLOP/s (log)", axis=_log_axis())
    colours = dict(zip(coloured, OP_COLOURS, strict=False))
    points["shown"] = points["op"].where(points["op"].isin(list(colours)), _OTHERS)
    # Grey first, so that no point of an op that was asked for is hidden.
    points = points.sort_values("shown", key=lambda shown: shown != _OTHERS, kind="stable")
    has_names = len(colours) <= MAX_NAMED
    colour = alt.Color(
        "shown:N",
        scale=alt.Scale(domain=[*colours, _OTHERS], range=[*colours.values(), palette.WAITING]),
        legend=None if has_names else alt.Legend(title=None, orient="bottom", columns=2, symbolType="circle"),
    )
    place = {"x": alt.X("intensity:Q", scale=x_scale), "y": alt.Y("tflop_per_s:Q", scale=y_scale)}
    marks = (
        alt.Chart(points)
        .mark_point(filled=True, size=90)
        .encode(
            **place,
            color=colour,
            opacity=alt.condition(f"datum.shown === '{_OTHERS}'", alt.value(0.45), alt.value(0.95)),
            shape=alt.Shape(
                "implementation:N",
                scale=alt.Scale(domain=list(IMPLEMENTATIONS.values()), range=["circle", "diamond"]),
                legend=alt.Legend(
                    title=None, orient="top-left", symbolFillColor=palette.BASELINE, symbolStrokeColor=palette.BASELINE
                )
                if len(set(points["implementation"])) > 1
                else None,
            ),
            tooltip=[
                alt.Tooltip("op:N", title="Op"),
                alt.Tooltip("shape:N", title="Shape"),
                alt.Tooltip("implementation:N", title="Timed"),
                alt.Tooltip("p50_us:Q", title="p50 µs", format=",.4~g"),
                alt.Tooltip("gb_per_s:Q", title="GB/s", format=",.4~g"),
                alt.Tooltip("tflop_per_s:Q", title="TFLOP/s", format=",.4~g"),
                alt.Tooltip("intensity:Q", title="FLOP per byte", format=",.4~g"),
                alt.Tooltip("share_of_limit:Q", title="Share of limit", format=".1%"),
                alt.Tooltip("limited_by:N", title="Limit"),
            ],
        )
    )
    line = alt.Chart(roof).mark_line(color=palette.BASELINE, strokeWidth=2, tooltip=None).encode(x=x, y=y)
    limits = f"{formatting.number(read_gb_per_s)} GB/s read, {formatting.number(matmul_tflop_per_s)} TFLOP/s matmul"
    names = _names(points, place, colour, middle=math.sqrt(low * high)) if has_names else []
    return _titled(
        alt.LayerChart(layer=[line, marks, *names]),
        "Roofline: speed over arithmetic intensity",
        subtitle=f"The line: {limits}",
    )


def attention_time(rows: Sequence[Row]) -> alt.LayerChart:
    return _over_length(rows, "p50_us", 1e-3, "Time of one request's attention", "ms, p50")


def attention_memory(rows: Sequence[Row]) -> alt.LayerChart:
    return _over_length(rows, "peak_memory_bytes", 2**-20, "Peak memory beyond the inputs", "MiB")


def graph_bars(steps: Mapping[str, DecodeStep]) -> alt.LayerChart:
    """Where a decode step's time goes, with graphs and without."""
    parts = {"whole step": "duration_ms", "model on the device": "execute_ms", "host: schedule, process": "host_ms"}
    data = pd.DataFrame(
        [(name, part, getattr(step, field)) for name, step in steps.items() for part, field in parts.items()],
        columns=["run", "part", "ms"],
    )
    base = alt.Chart(data).encode(
        y=alt.Y("part:N", title=None, sort=list(parts), axis=alt.Axis(labelLimit=180)),
        yOffset=alt.YOffset("run:N", sort=list(steps)),
        x=alt.X("ms:Q", title="ms per decode step, median", scale=alt.Scale(zero=True, nice=True)),
    )
    colours = alt.Scale(domain=list(steps), range=[palette.DECODE, palette.BASELINE])
    bars = base.mark_bar().encode(
        color=alt.Color("run:N", scale=colours, legend=alt.Legend(title=None, orient="bottom")),
        tooltip=[
            alt.Tooltip("run:N", title=" "),
            alt.Tooltip("part:N", title=" "),
            alt.Tooltip("ms:Q", title="ms", format=",.4~g"),
        ],
    )
    values = base.mark_text(align="left", dx=4, color=palette.BASELINE).encode(text=alt.Text("ms:Q", format=",.3~g"))
    return _titled(alt.LayerChart(layer=[bars, values]), "A decode step with CUDA graphs and without", height=220)


def _over_length(rows: Sequence[Row], field: str, scale: float, title: str, unit: str) -> alt.LayerChart:
    points = [Point(row["implementation"], row["length"], row[field] * scale) for row in rows if row[field] is not None]
    names = dict.fromkeys(point.series for point in points)
    colours = {name: ATTENTION_COLOURS.get(name, palette.CACHED) for name in names}
    longest = max((point.x for point in points), default=1.0)
    return lines(points, colours, x_end=longest, title=title, x_title="tokens", y_title=unit)


def _roofline_points(timings: Sequence[Row]) -> pd.DataFrame:
    columns = ["op", "shape", "p50_us", "gb_per_s", "tflop_per_s", "share_of_limit", "limited_by"]
    rows = [
        {
            **{name: row[name] for name in columns},
            "implementation": IMPLEMENTATIONS[row["implementation"]],
            "intensity": row["flops"] / row["bytes_moved"],
        }
        for row in timings
        if row["flops"] and row["bytes_moved"]
    ]
    return pd.DataFrame(rows, columns=[*columns, "implementation", "intensity"])


def _names(points: pd.DataFrame, place: Mapping[str, Any], colour: alt.Color, *, middle: float) -> list[alt.Chart]:
    """The coloured ops' names, each at its fastest point, on the side where there is room.

    The highest stands above its point and the lowest below: names do not meet where points do.
    """
    named = points.query("shown != @_OTHERS").sort_values("tflop_per_s", ascending=False).drop_duplicates("op")
    above = {1: [0], 2: [-12, 12], 3: [-12, 0, 12]}.get(len(named), [])
    return [
        alt.Chart(named.iloc[[rank]])
        .mark_text(
            align="right" if x > middle else "left", dx=-9 if x > middle else 9, dy=dy, fontSize=12, fontWeight=600
        )
        .encode(**place, text="op:N", color=colour)
        for rank, (x, dy) in enumerate(zip(named["intensity"], above, strict=True))
    ]


def _domain(values: Sequence[float]) -> tuple[float, float]:
    known = [value for value in values if value > 0 and math.isfinite(value)]
    return min(known) / _MARGIN, max(known) * _MARGIN


def _log_axis() -> alt.Axis:
    return alt.Axis(format="~g", tickCount=6, grid=True, gridOpacity=0.3)


def _titled(chart: alt.LayerChart, title: str, height: int = HEIGHT, subtitle: str = "") -> alt.LayerChart:
    heading = alt.Title(
        title, subtitle=subtitle, subtitleColor=palette.BASELINE, anchor="start", fontSize=14, fontWeight=600, offset=10
    )
    return chart.properties(title=heading, height=height, padding={"left": 5, "top": 5, "bottom": 5, "right": 12})
