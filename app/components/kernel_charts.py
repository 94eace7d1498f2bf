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
# Okabe–Ito first, then what is left to tell apart on light and dark.
OP_COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C7A00"),
    *("#7F7F7F", "#8E5BD9", "#2BB3A3", "#B5651D", "#E377C2", "#5C8A3A", "#4C6A92"),
)
IMPLEMENTATIONS = {"launch": "Triton kernel", "reference": "torch reference"}
ATTENTION_COLOURS = {
    "unfused": palette.BASELINE,
    "fused, torch": palette.PREFILL,
    "paged, ours": palette.DECODE,
    "paged reference": palette.DECODE,
}
_MARGIN = 2.5  # room around the points, as a factor


def roofline(timings: Sequence[Row], *, read_gb_per_s: float, matmul_tflop_per_s: float) -> alt.LayerChart:
    """Each timing below the roof: what memory gives at its arithmetic intensity, or what matrix products reach.

    Timings without arithmetic have no place on a log axis and are left out.
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
    ops = list(dict.fromkeys(points["op"]))
    marks = (
        alt.Chart(points)
        .mark_point(filled=True, size=90, opacity=0.9)
        .encode(
            x=alt.X("intensity:Q", scale=x_scale, title="FLOP per byte moved (log)", axis=_log_axis()),
            y=alt.Y("tflop_per_s:Q", scale=y_scale, title="TFLOP/s (log)", axis=_log_axis()),
            color=alt.Color(
                "op:N",
                scale=alt.Scale(domain=ops, range=[OP_COLOURS[i % len(OP_COLOURS)] for i in range(len(ops))]),
                legend=alt.Legend(title=None, orient="bottom", columns=3, symbolType="circle"),
            ),
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
    chart = alt.LayerChart(layer=[line, marks])
    return _titled(
        chart,
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
