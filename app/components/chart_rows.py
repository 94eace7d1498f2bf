"""The data of charts: rows, the ends of axes, places of labels. Pure, and cheap enough to be made every second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

MAX_DIRECT_LABELS = 3  # with more series a legend names them
MAX_ECDF_POINTS = 300

_LABEL_GAP = 0.1  # least distance between two direct labels, as a share of the axis
_COLUMNS = ("kind", "series", "x", "y", "label")


class Point(NamedTuple):
    series: str
    x: float
    y: float | None


def line_rows(
    points: Sequence[Point], colours: Mapping[str, str], *, x_end: float | None = None, y_end: float | None = None
) -> pd.DataFrame:
    """What `charts.line_chart` draws: the points, a frame as large as the axes, and a name at the end of each line.

    Args:
        points: in x order within a series; `y` None breaks the line.
        colours: series -> colour.
        x_end, y_end: where the axes end, by default rounded up from the data.
    """
    drawn = [(point.x, point.y) for point in points if point.y is not None]
    x_end = axis_end(max((x for x, _ in drawn), default=1.0)) if x_end is None else x_end
    y_end = axis_end(max((y for _, y in drawn), default=1.0)) if y_end is None else y_end
    rows: list[tuple] = [("line", point.series, point.x, point.y, None) for point in points]
    rows += [("frame", None, 0.0, 0.0, None), ("frame", None, x_end, y_end, None)]
    if has_direct_labels(colours):
        rows += label_rows(points, colours, y_end)
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def stacked_rows(points: Sequence[Point], colours: Mapping[str, str]) -> pd.DataFrame:
    """What `charts.stacked_chart` draws: every series at the same x, in the order of `colours` from below."""
    places = {name: place for place, name in enumerate(colours)}
    rows = [(point.series, point.x, point.y or 0.0, places[point.series]) for point in points]
    return pd.DataFrame(rows, columns=["series", "x", "y", "order"])


def has_direct_labels(colours: Mapping[str, str]) -> bool:
    """Whether lines carry their names: one needs none, and many would cover each other."""
    return 1 < len(colours) <= MAX_DIRECT_LABELS


def ecdf_points(values: Sequence[float], max_points: int = MAX_ECDF_POINTS) -> list[tuple[float, float]]:
    """(value, share of values <= value), ascending; long samples are thinned evenly, with both ends kept."""
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        return []
    places = range(n) if n <= max_points else sorted({round(i * (n - 1) / (max_points - 1)) for i in range(max_points)})
    return [(ordered[0], 0.0)] + [(ordered[place], (place + 1) / n) for place in places]


def axis_end(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten at or above `value`: an axis that grows in few jumps."""
    if not math.isfinite(value) or value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8) if step * power >= value * (1 - 1e-9)), 10 * power)


def label_rows(points: Sequence[Point], colours: Mapping[str, str], y_end: float) -> list[tuple]:
    """A name at the end of each line, moved apart where the ends meet and kept below the top of the axis."""
    ends = {point.series: (point.x, point.y) for point in points if point.y is not None}
    order = sorted(ends, key=lambda name: (ends[name][1], -list(colours).index(name)))
    heights: list[float] = []
    for name in order:
        heights.append(max(ends[name][1], heights[-1] + _LABEL_GAP * y_end if heights else 0.0))
    ceiling = y_end
    for place in reversed(range(len(heights))):
        heights[place] = min(heights[place], ceiling)
        ceiling = heights[place] - _LABEL_GAP * y_end
    return [("label", name, ends[name][0], height, name) for name, height in zip(order, heights, strict=True)]
