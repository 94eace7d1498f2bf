"""The pictures of the Speculation page. Pure. Specs are built once per process and shape, as in `scheduler_charts`."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import altair as alt
import pandas as pd

from app.components import palette
from app.components.chart_rows import Point, line_rows
from app.components.charts import line_chart, spec_without_data
from app.components.live_charts import TIME, Picture
from app.components.speculation_rows import CELLS, LAST, Cell
from backend.analysis.draft_rounds import PositionRate
from backend.analysis.speculation import Prediction

HEIGHT = 230
_ROW, _AROUND = 20, 62  # pixels of a round, and of what is above and below them
_MAX_TEXTS = 14  # columns, above which there is no room for tokens in the cells
_LENGTH = {"length": palette.PREFILL}


def rounds(cells: Sequence[Cell], title: str, num_columns: int) -> Picture:
    """A line per round: its drafted tokens in their order, and the token that the target set behind the accepted ones.

    Args:
        num_columns: most drafted tokens of a round.
    """
    num_rows = len({cell.round for cell in cells})
    spec = json.loads(_rounds(num_rows, num_columns))  # anew each time: Streamlit writes into the spec it is given
    spec["title"]["text"] = title
    return Picture(pd.DataFrame(cells, columns=list(Cell._fields)), spec)


def by_position(rates: Sequence[PositionRate]) -> Picture:
    rows = [
        {"position": each.position, "rate": each.rate, "num_tested": each.num_tested, "num_accepted": each.num_accepted}
        for each in rates
    ]
    columns = ["position", "rate", "num_tested", "num_accepted"]
    return Picture(pd.DataFrame(rows, columns=columns), json.loads(_by_position()))


def over_time(points: Sequence[tuple[float, float]], window: int, longest: int) -> Picture:
    """Mean acceptance length of the last `window` rounds, by seconds since the start; axis up to `longest` tokens."""
    rows = line_rows([Point("length", x, y) for x, y in points], _LENGTH, y_end=float(longest))
    spec = json.loads(_over_time())
    spec["title"]["text"] = f"Acceptance length, mean of {window:,} rounds"
    return Picture(rows, spec)


def by_length(predictions: Sequence[Prediction], configured: int) -> Picture:
    """Predicted speedup by the number of drafted tokens."""
    best = max(predictions, key=lambda each: each.speedup).num_speculative_tokens
    rows = [
        {
            "k": each.num_speculative_tokens,
            "speedup": each.speedup,
            "length": each.mean_acceptance_length,
            "cost": each.draft_cost + each.verify_cost,
            "kind": "best" if each.num_speculative_tokens == best else "other",
            "label": f"×{each.speedup:.2f}" + (" as set" if each.num_speculative_tokens == configured else ""),
        }
        for each in predictions
    ]
    columns = ["k", "speedup", "length", "cost", "kind", "label"]
    return Picture(pd.DataFrame(rows, columns=columns), json.loads(_by_length()))


@functools.cache
def _rounds(num_rows: int, num_columns: int) -> str:
    base = alt.Chart(pd.DataFrame(columns=list(Cell._fields)))
    order = [*map(str, range(1, num_columns + 1)), LAST]
    x = alt.X(
        "column:O",
        title="position in the draft, and behind it the target's own token",
        sort=order,
        axis=alt.Axis(orient="top", labelAngle=0, ticks=False, domain=False, labelOverlap="greedy"),
        scale=alt.Scale(domain=order, paddingInner=0.06, paddingOuter=0.02),
    )
    y = alt.Y(
        "round:O",
        title="round",
        sort=None,
        axis=alt.Axis(labelOverlap="greedy", ticks=False, domain=False),
        scale=alt.Scale(paddingInner=0.14, paddingOuter=0.1),
    )
    colours = {name: kind.colour for name, kind in CELLS.items()}
    tooltip = [
        alt.Tooltip("text:N", title="token"),
        alt.Tooltip("token_id:Q", title="id"),
        alt.Tooltip("kind:N", title=" "),
        *(
            alt.Tooltip(f"{name}:N", title=title)
            for name, title in (
                ("draft_prob", "p of the draft"),
                ("target_prob", "p of the target"),
                ("accept_prob", "p to be accepted"),
            )
        ),
        alt.Tooltip("place:Q", title="output position", format=","),
        alt.Tooltip("draft_ms:Q", title="draft, ms", format=",.3~g"),
        alt.Tooltip("verify_ms:Q", title="verify, ms", format=",.3~g"),
        alt.Tooltip("step:Q", title="step", format=","),
    ]
    cells = (
        base.mark_rect(cornerRadius=2)
        .properties(name="cells")
        .encode(
            x=x,
            y=y,
            color=alt.Color("kind:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())), legend=None),
            tooltip=tooltip,
        )
    )
    layers: list[alt.Chart] = [cells]
    if num_columns < _MAX_TEXTS:
        words = base.mark_text(
            color="#111111", fontSize=11, aria=False, limit=alt.ExprRef("max(1, bandwidth('x') - 6)"), clip=True
        )
        layers.append(words.encode(x=x, y=y, text="text:N", tooltip=tooltip))  # it lies on the cell
    return _finished(alt.LayerChart(layer=layers), _AROUND + _ROW * num_rows)


@functools.cache
def _by_position() -> str:
    base = alt.Chart(pd.DataFrame(columns=["position", "rate", "num_tested", "num_accepted"]))
    x = alt.X("position:O", title="position in the draft", axis=alt.Axis(labelAngle=0, ticks=False))
    y = alt.Y(
        "rate:Q",
        title="accepted of those tested",
        axis=alt.Axis(format=".0%", tickCount=4),
        scale=alt.Scale(domain=[0, 1]),
    )
    tooltip = [
        alt.Tooltip("position:O", title="position"),
        alt.Tooltip("rate:Q", title="acceptance rate", format=".1%"),
        alt.Tooltip("num_accepted:Q", title="accepted", format=","),
        alt.Tooltip("num_tested:Q", title="tested", format=","),
    ]
    bars = (
        base.mark_bar(color=CELLS["accepted"].colour, size=26)
        .properties(name="rates")
        .encode(x=x, y=y, tooltip=tooltip)
    )
    counts = base.mark_text(dy=-7, fontSize=11, color=palette.BASELINE, tooltip=None).encode(
        x=x, y=y, text=alt.Text("num_tested:Q", format="~s")
    )
    return _finished(alt.LayerChart(layer=[bars, counts]), HEIGHT, "Acceptance by position, and how many were tested")


@functools.cache
def _over_time() -> str:
    chart = line_chart(line_rows([], _LENGTH), _LENGTH, title="length", x_title=TIME, y_title="tokens of a round")
    return spec_without_data(chart.properties(height=HEIGHT))


@functools.cache
def _by_length() -> str:
    base = alt.Chart(pd.DataFrame(columns=["k", "speedup", "length", "cost", "kind", "label"]))
    x = alt.X("k:O", title="drafted tokens of a round (k)", axis=alt.Axis(labelAngle=0, ticks=False))
    y = alt.Y("speedup:Q", title="times plain decoding", axis=alt.Axis(tickCount=4), scale=alt.Scale(zero=True))
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=["best", "other"], range=[CELLS["accepted"].colour, palette.BASELINE]),
        legend=None,
    )
    tooltip = [
        alt.Tooltip("k:O", title="k"),
        alt.Tooltip("speedup:Q", title="predicted speedup", format=".3f"),
        alt.Tooltip("length:Q", title="tokens of a round", format=".3f"),
        alt.Tooltip("cost:Q", title="plain steps of a round", format=".3f"),
    ]
    bars = base.mark_bar(size=26).properties(name="lengths").encode(x=x, y=y, color=colour, tooltip=tooltip)
    words = base.mark_text(dy=-7, fontSize=11, color=palette.BASELINE, tooltip=None).encode(x=x, y=y, text="label:N")
    return _finished(alt.LayerChart(layer=[bars, words]), HEIGHT, "Predicted speedup by drafted tokens")


def _finished(chart: alt.LayerChart, height: int, title: str = "title") -> str:
    heading = alt.Title(title, anchor="start", fontSize=14, fontWeight=600, offset=8)
    padding = {"left": 5, "top": 5, "bottom": 5, "right": 12}
    return spec_without_data(chart.properties(title=heading, height=height, padding=padding))
