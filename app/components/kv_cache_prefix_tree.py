"""The picture and the table of a run's prefix tree. Pure.

A node is as wide as it has tokens and as high as requests go through it, so that areas are prompt tokens, in the colours of
what became of them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import pandas as pd

from app import formatting
from app.components import palette
from app.components.charts import NUMBER, spec_without_data
from app.components.kv_cache_map import request_name
from app.components.live_charts import Picture
from backend.analysis.prefix_cache import Fate
from backend.analysis.prefix_tree import TreeNode, walk

MAX_LEAVES = 50
MAX_TABLE_ROWS = 200

Begins = Callable[[TreeNode], str]  # the first tokens of a node, in words

FATE_NAMES: dict[Fate, tuple[str, str]] = {
    "cached": ("from the cache", palette.CACHED),
    "new": ("not seen before", palette.PREFILL),
    "lost": ("no longer there", palette.RECOMPUTE),
    "pending": ("being computed by another", palette.WAITING),
    "end": ("last block, always computed", palette.FREE),
}

_COLUMNS = ["part", "x", "x2", "y", "y2", "what", "requests", "hits", "saved", "computed", "begins", "label", "dark"]
_LIGHT_FATES = ("cached", "pending", "end")  # on which dark letters are read
_ROW = 18  # pixels of a leaf, where there is room
_HEIGHTS = (110, 420)
_FRAME = 92  # pixels of title and axis
_LABEL_WIDTH, _LABEL_HEIGHT = 0.19, 14  # of the picture's width; pixels


def tree_rows(roots: Sequence[TreeNode], begins: Begins) -> pd.DataFrame:
    """A rectangle per node and fate of its tokens."""
    rows: list[dict[str, Any]] = []
    width, height = _extent(roots)
    pixels = (tree_height(roots) - _FRAME) / max(1, height)
    tops = {id(root): top for root, top in zip(roots, _tops(roots, 0), strict=True)}
    for node in walk(roots):
        top = tops[id(node)]
        tops |= {id(child): below for child, below in zip(node.children, _tops(node.children, top), strict=True)}
        end = float(top)
        for fate, (name, _) in FATE_NAMES.items():
            if not node.tokens.get(fate):
                continue
            begin, end = end, end + node.num_requests * node.tokens[fate] / node.num_tokens
            fits = (node.end - node.start) >= _LABEL_WIDTH * width and (end - begin) * pixels >= _LABEL_HEIGHT
            rows.append(
                {
                    "part": name,
                    "x": node.start,
                    "x2": node.end,
                    "y": begin,
                    "y2": end,
                    "what": _what(node),
                    "requests": node.num_requests,
                    "hits": node.num_hits,
                    "saved": node.num_saved,
                    "computed": node.num_tokens - node.num_saved,
                    "begins": begins(node),
                    "label": _label(node, end - begin) if fits else "",
                    "dark": fate not in _LIGHT_FATES,
                }
            )
    return pd.DataFrame(rows, columns=_COLUMNS)


def tree_height(roots: Sequence[TreeNode]) -> int:
    """Pixels, title and axis included."""
    num_leaves = sum(not node.children for node in walk(roots))
    return _FRAME + min(max(_HEIGHTS[0], _ROW * num_leaves), _HEIGHTS[1])


def tree_picture(roots: Sequence[TreeNode], begins: Begins, title: str) -> Picture:
    rows = tree_rows(roots, begins)
    spec = json.loads(_spec(tree_height(roots)))  # anew each time: Streamlit writes into the spec it is given
    spec["title"]["text"] = title
    return Picture(rows, spec)


def tree_table(roots: Sequence[TreeNode], begins: Begins) -> tuple[pd.DataFrame, int]:
    """The beginnings that several requests had or one found, those that saved most first; and how many there are."""
    shared = [node for node in walk(roots) if node.kind == "blocks" and (node.num_requests > 1 or node.num_hits)]
    shared.sort(key=lambda node: (-node.num_saved, -node.num_tokens))
    rows = [
        {
            "Tokens": f"{node.start:,}–{int(node.end) - 1:,}",
            "Length": int(node.end) - node.start,
            "Requests": node.num_requests,
            "Found it": node.num_hits,
            "Computed": node.num_requests - node.num_hits,
            "Tokens saved": node.num_saved,
            "First in": request_name(node.first),
            "Begins with": begins(node),
        }
        for node in shared[:MAX_TABLE_ROWS]
    ]
    return pd.DataFrame(rows), len(shared)


def _extent(roots: Sequence[TreeNode]) -> tuple[float, int]:
    """Tokens and requests."""
    return max((node.end for node in walk(roots)), default=0.0), sum(node.num_requests for node in roots)


def _tops(siblings: Sequence[TreeNode], top: float) -> list[float]:
    tops = []
    for node in siblings:
        tops.append(top)
        top += node.num_requests
    return tops


def _what(node: TreeNode) -> str:
    if node.kind == "merged":
        return f"{formatting.count(node.num_merged)} branches, drawn as one"
    if node.kind == "ends":
        what = "end" if node.num_requests == 1 else "ends"
        return f"{what} of prompts that do not fill a block, from token {formatting.count(node.start)}"
    who = f", request {request_name(node.first)}" if node.num_requests == 1 else ""
    return f"tokens {formatting.count(node.start)} to {formatting.count(int(node.end) - 1)}{who}"


def _label(node: TreeNode, num_requests: float) -> str:
    if node.kind == "merged":
        return f"{formatting.count(node.num_merged)} more"
    return f"{formatting.count(round(num_requests))} × {formatting.count(round(node.end - node.start))}"


@functools.cache
def _spec(height: int) -> str:
    base = alt.Chart(pd.DataFrame(columns=_COLUMNS))
    names, colours = zip(*FATE_NAMES.values(), strict=True)
    x = alt.X(
        "x:Q",
        title="token of the prompt",
        axis=alt.Axis(grid=False, tickCount=6, format=NUMBER),
        scale=alt.Scale(nice=False, zero=True),
    )
    y = alt.Y(
        "y:Q",
        title="requests",
        axis=alt.Axis(grid=False, tickCount=4, tickMinStep=1, format=NUMBER),
        scale=alt.Scale(nice=False, zero=True, reverse=True),
    )
    nodes = (
        base.mark_rect(x2Offset=-1, y2Offset=-0.5)
        .properties(name="nodes")
        .encode(
            x=x,
            x2="x2:Q",
            y=y,
            y2="y2:Q",
            color=alt.Color("part:N", scale=alt.Scale(domain=list(names), range=list(colours)), legend=None),
            tooltip=[
                alt.Tooltip("what:N", title=" "),
                alt.Tooltip("requests:Q", title="requests", format=",d"),
                alt.Tooltip("hits:Q", title="found it", format=",d"),
                alt.Tooltip("saved:Q", title="tokens saved", format=",d"),
                alt.Tooltip("computed:Q", title="tokens computed", format=",d"),
                alt.Tooltip("begins:N", title="begins with"),
            ],
        )
    )
    labels = (
        base.transform_filter("datum.label != ''")
        .transform_calculate(middle="(datum.y + datum.y2) / 2")
        .mark_text(align="left", baseline="middle", dx=6, fontSize=11, fontWeight=600, tooltip=None)
        .encode(
            x=x,
            y=alt.Y("middle:Q"),
            text="label:N",
            color=alt.condition("datum.dark", alt.value("#FFFFFF"), alt.value("#11161D")),
        )
    )
    heading = alt.Title("title", anchor="start", fontSize=14, fontWeight=600, offset=10)
    chart = alt.LayerChart(layer=[nodes, labels]).properties(
        title=heading, height=height, padding={"left": 5, "top": 5, "bottom": 5, "right": 12}
    )
    return spec_without_data(chart)
