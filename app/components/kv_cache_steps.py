"""When the steps of a run were, and the pool's blocks over them, from the database's step rows. Pure.

Rows of long runs are thinned: a row then stands for several steps, of which it tells the last one's end.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from app.components import palette
from app.components.charts import NUMBER, spec_without_data
from app.components.live_charts import Picture

Row = Mapping[str, Any]

HEIGHT = 260
BLOCKS = {  # from below
    "referenced": ("num_referenced_blocks", palette.IN_USE),
    "evictable": ("num_evictable_blocks", palette.CACHED),
    "free": ("num_free_blocks", palette.FREE),
}
_MARK = "#11161D"  # on the three colours, which fill the picture in light and dark


class StepTimes:
    """Seconds since the run's start; between the ends that thinned rows tell, steps count as equally long."""

    def __init__(self, rows: Sequence[Row]) -> None:
        timed = [row for row in rows if row["end_time"] is not None]
        self._last_steps = np.array([row["step"] + row["num_steps"] - 1 for row in timed])
        self._ends = np.array([row["end_time"] for row in timed])
        self._peak = max(rows, key=lambda row: row["num_referenced_blocks"])["step"] if rows else None

    @property
    def peak_step(self) -> int | None:
        """The first in which most blocks are held."""
        return self._peak

    def end_of(self, step: int) -> float | None:
        """When the step ended; None for one that no row tells of."""
        if not len(self._ends) or step > self._last_steps[-1]:
            return None
        return float(np.interp(step, self._last_steps, self._ends))

    def step_at(self, time_s: float) -> int | None:
        """The step under way then: the first that ends at that time or later."""
        if not len(self._ends):
            return None
        place = float(np.interp(time_s, self._ends, self._last_steps))
        return int(np.ceil(place - 1e-6))  # interpolation is not exact to the last bit


def usage(rows: Sequence[Row], step: int) -> Picture:
    """Referenced, evictable and free blocks on top of each other over the steps, with one step marked."""
    points: list[tuple[str, str | None, float, float, int]] = []
    for order, (name, (field, _)) in enumerate(BLOCKS.items()):
        points += [("area", name, row["step"], row[field], order) for row in rows]
        if rows:  # the last stair is as wide as its steps
            points.append(("area", name, rows[-1]["step"] + rows[-1]["num_steps"], rows[-1][field], order))
    points.append(("mark", None, step + 0.5, 0.0, 0))
    data = pd.DataFrame(points, columns=["kind", "series", "x", "y", "order"])
    return Picture(data, json.loads(_spec()))  # read anew each time: Streamlit writes into the spec it is given


@functools.cache
def _spec() -> str:
    data = pd.DataFrame([("area", "free", 0.0, 0.0, 0)], columns=["kind", "series", "x", "y", "order"])
    scale = alt.Scale(domain=list(BLOCKS), range=[colour for _, colour in BLOCKS.values()])
    x = alt.X("x:Q", title="step", axis=alt.Axis(grid=False, tickCount=6), scale=alt.Scale(nice=False, zero=False))
    base = alt.Chart(data)
    areas = (
        base.transform_filter("datum.kind == 'area'")
        .mark_area(interpolate="step-after")
        .encode(
            x=x,
            y=alt.Y(
                "y:Q",
                title="blocks",
                stack="zero",
                axis=alt.Axis(tickCount=4, format=NUMBER),
                scale=alt.Scale(nice=False, zero=True),
            ),
            color=alt.Color(
                "series:N",
                scale=scale,
                legend=alt.Legend(title=None, orient="bottom", columns=2),
            ),
            order="order:O",
            tooltip=[
                alt.Tooltip("series:N", title=" "),
                alt.Tooltip("x:Q", title="step", format=",d"),
                alt.Tooltip("y:Q", title="blocks", format=",.4~g"),
            ],
        )
    )
    mark = base.transform_filter("datum.kind == 'mark'").mark_rule(color=_MARK, strokeWidth=2, tooltip=None).encode(x=x)
    heading = alt.Title("Blocks over the run", anchor="start", fontSize=14, fontWeight=600, offset=10)
    chart = alt.LayerChart(layer=[areas, mark]).properties(
        title=heading, height=HEIGHT, padding={"left": 5, "top": 5, "bottom": 5, "right": 12}
    )
    return spec_without_data(chart)
