"""The picture of the Sizing page: what one request's KV takes as it grows. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import altair as alt
import pandas as pd

from app import formatting
from app.components import palette
from backend.analysis.kv_size import KVSize

HEIGHT = 300
WITHOUT_WINDOWS = "without windows"

_FIRST = 64  # tokens at the left end, unless the request is shorter
_POINTS = 60
_LONGEST_UNKNOWN = 131_072  # tokens at the right end where the config names no limit
_MOST_TICKS = 6
_BINARY = (
    "datum.value >= 1099511627776 ? format(datum.value / 1099511627776, ',~g') + ' TiB' : "
    "datum.value >= 1073741824 ? format(datum.value / 1073741824, ',~g') + ' GiB' : "
    "datum.value >= 1048576 ? format(datum.value / 1048576, ',~g') + ' MiB' : "
    "datum.value >= 1024 ? format(datum.value / 1024, ',~g') + ' KiB' : format(datum.value, ',~g') + ' B'"
)


class LengthPoint(NamedTuple):
    series: str
    tokens: int
    num_bytes: int


def kv_over_length(kv: KVSize, length: int, room_bytes: int | None) -> alt.LayerChart:
    """KV of one request over its length, both axes logarithmic; windows bend the line.

    Args:
        kv: the model's.
        length: tokens of the request that the page is asked about, marked on the line.
        room_bytes: what the card has for KV, as a line across; None or nothing draws none.
    """
    points = length_points(kv, length)
    room_bytes = room_bytes if room_bytes is not None and room_bytes > 0 else None
    sizes = [point.num_bytes for point in points] + ([room_bytes] if room_bytes else [])
    low, high = min(sizes) / 1.5, max(sizes) * 2
    first, last = points[0].tokens, max(point.tokens for point in points)
    data = pd.DataFrame(
        [(*point, formatting.memory(point.num_bytes)) for point in points], columns=["series", "tokens", "bytes", "KV"]
    )
    x = alt.X(
        "tokens:Q",
        title="tokens of the request (log)",
        scale=alt.Scale(type="log", domain=[first, last], nice=False),
        axis=alt.Axis(values=powers_of_two(first, last), format=",", grid=False),
    )
    y = alt.Y(
        "bytes:Q",
        title="KV of the request (log)",
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
        axis=alt.Axis(values=powers_of_two(low, high), labelExpr=_BINARY, gridOpacity=0.3),
    )
    tooltip = [alt.Tooltip("series:N", title=" "), alt.Tooltip("tokens:Q", format=","), alt.Tooltip("KV:N")]
    base = alt.Chart(data).encode(x=x, y=y)
    layers: list[alt.Chart] = []
    if any(group.window is not None for group in kv.groups):
        without = base.transform_filter(f"datum.series == '{WITHOUT_WINDOWS}'")
        layers.append(without.mark_line(color=palette.BASELINE, strokeDash=[5, 3], strokeWidth=2))
        layers.append(
            alt.Chart(data[(data["series"] == WITHOUT_WINDOWS) & (data["tokens"] == _label_place(points))])
            .mark_text(align="right", dx=-8, dy=-6, fontSize=12, fontWeight=600, color=palette.BASELINE)
            .encode(x=x, y=y, text="series:N")
        )
    layers.append(base.transform_filter("datum.series == 'KV'").mark_line(color=palette.IN_USE, strokeWidth=2.5))
    layers.append(base.transform_filter("datum.series == 'KV'").mark_point(opacity=0, size=120).encode(tooltip=tooltip))
    if room_bytes:
        room = pd.DataFrame([{"tokens": first, "bytes": room_bytes, "text": "room for KV on the card"}])
        layers.append(alt.Chart(room).mark_rule(color=palette.WEIGHTS, strokeDash=[2, 2], strokeWidth=1.5).encode(y=y))
        layers.append(
            alt.Chart(room)
            .mark_text(align="left", dx=6, dy=-8, fontSize=12, color=palette.BASELINE)
            .encode(x=x, y=y, text="text:N")
        )
    request = base.transform_filter("datum.series == 'request'")
    layers.append(
        request.mark_point(filled=True, size=110, opacity=1, color=palette.DECODE).encode(tooltip=tooltip[1:])
    )
    layers.append(
        request.mark_text(align="left", dx=9, dy=11, fontSize=12, fontWeight=600, color=palette.DECODE).encode(
            text="KV:N"
        )
    )
    title = alt.Title("KV cache of one request over its length", anchor="start", fontSize=14, fontWeight=600, offset=10)
    return alt.LayerChart(layer=layers).properties(
        title=title, height=HEIGHT, padding={"left": 5, "top": 5, "bottom": 5, "right": 25}
    )


def length_points(kv: KVSize, length: int) -> list[LengthPoint]:
    """The chart's points; the bends of windows are among them.

    Series: `KV`, `without windows` where layers have windows, and `request`, one point.
    """
    first = min(_FIRST, length)
    last = max(kv.shape.max_position_embeddings or _LONGEST_UNKNOWN, length, 2 * first)
    windows = [group.window for group in kv.groups if group.window is not None]
    steps = {round(first * (last / first) ** (place / (_POINTS - 1))) for place in range(_POINTS)}
    lengths = sorted({*steps, *(window for window in windows if first < window < last), length, first, last})
    points = [LengthPoint("KV", tokens, kv.request(tokens).num_bytes) for tokens in lengths]
    if windows:
        points += [LengthPoint(WITHOUT_WINDOWS, tokens, tokens * kv.bytes_per_token) for tokens in lengths]
    return [*points, LengthPoint("request", length, kv.request(length).num_bytes)]


def _label_place(points: Sequence[LengthPoint]) -> int:
    """Tokens of a point in the middle between the bend and the right end, on a log axis."""
    bent = {point.tokens: point.num_bytes for point in points if point.series == "KV"}
    apart = [p.tokens for p in points if p.series == WITHOUT_WINDOWS and p.num_bytes > bent[p.tokens]]
    return apart[len(apart) // 2] if apart else points[0].tokens


def powers_of_two(low: float, high: float) -> Sequence[float]:
    """At most six ticks between both ends, evenly apart on a log axis, each a power of two."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
    return [2.0**power for power in range(first, last + 1, step)]
