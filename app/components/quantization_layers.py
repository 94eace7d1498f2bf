"""Below the matrix: layers' errors and outliers, and a layer's weights on a method's grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import notes, quantization_charts
from app.quantization_texts import KIND_TITLES
from backend.errors import ServeLabError
from backend.experiments.layer_error import KINDS
from backend.experiments.quantization_config import CALIBRATED, REFERENCE, parse_variant, variant_name
from backend.experiments.quantization_results import layer_cells, outliers, wholes
from backend.experiments.weight_histogram import weight_histogram
from backend.models.sources import resolve_source
from db.run_rows import Run

_VARIANT, _LAYER, _KIND = (f"quantization-weights-{name}" for name in ("variant", "layer", "kind"))


def errors(results: Sequence[Any]) -> None:
    """Layer x method, the relative error of each layer's output; then the channels that stand out."""
    cells = layer_cells(results)
    if not cells:
        st.info("This run measured no layers. Leave **Layers** on, under Advanced.", icon=":material/grid_on:")
        return
    domain = quantization_charts.error_domain(cells)
    with st.container(key="quantization-heat"), st.grid(2, min_column_width=340):
        kinds = [kind for kind in KINDS if any(cell["kind"] == kind for cell in cells)]
        for kind in kinds:
            chart = quantization_charts.heat_map(cells, kind, domain, legend=kind == kinds[-1])
            st.altair_chart(chart, key=f"quantization-heat-{kind}")
    st.caption(
        "Relative error of the layer's output on the reference's activations, "
        "$\\lVert XW^T - Q(X)\\rVert / \\lVert XW^T\\rVert$, on one logarithmic scale. "
        "The scales of awq, which a layer's neighbours undo, are left out."
    )
    for row in wholes(results):
        if row["layers_problem"]:
            st.caption(notes.plain(f"{variant_name(row['variant'])} is not in the picture: {row['layers_problem']}."))
    found = outliers(results)
    if found:
        st.markdown(
            "**Outlier channels**: inputs whose root mean square is many times that of the layer's median input."
        )
        table = pd.DataFrame(
            [
                {
                    "Layer": outlier.layer,
                    "Kind": KIND_TITLES[outlier.kind],
                    "Channel": outlier.channel,
                    "Times the median": float(f"{outlier.ratio:.3g}"),
                }
                for outlier in found
            ]
        )
        st.dataframe(table, hide_index=True, lazy=False, height="content", width="content", key="quantization-outliers")


def weights(run: Run, results: Sequence[Any]) -> None:
    """The histogram of a chosen layer, computed when it is looked at."""
    rows = {row["variant"]: row for row in wholes(results) if _has_grid(row)}
    if not rows:
        st.info("No variant of this run has weights on a grid.", icon=":material/bar_chart:")
        return
    state = st.session_state
    if state.get(_VARIANT) not in rows:
        state[_VARIANT] = next(iter(rows))
    worst = max(layer_cells(results), key=lambda cell: cell["output_error"] or 0, default=None)
    state.setdefault(_LAYER, worst["layer"] if worst else 0)
    state.setdefault(_KIND, worst["kind"] if worst else "down")
    with st.grid(3, min_column_width=180):
        variant = st.selectbox("Variant", list(rows), format_func=variant_name, key=_VARIANT) or next(iter(rows))
        layer = st.number_input("Layer", value=None, step=1, key=_LAYER, help="From 0 on.")
        kind = st.selectbox("Kind", list(KINDS), format_func=lambda name: KIND_TITLES[name], key=_KIND)
    try:
        parsed = parse_variant(variant)
        found = weight_histogram(resolve_source(run.model), parsed.quantization, int(layer or 0), kind)
    except ServeLabError as error:
        st.error(notes.plain(f"{error}."), icon=":material/error:")
        return
    st.altair_chart(
        quantization_charts.histogram(
            found.edges,
            found.counts,
            found.levels,
            title=f"Layer {int(layer or 0)}, {KIND_TITLES[kind].lower()}: {variant_name(variant)}",
            x_title=f"weight, {found.unit}",
        ),
        key="quantization-histogram",
    )
    text = (
        f"{formatting.count(found.num_weights)} weights, each in the scale that it shares with "
        f"{formatting.count(found.group_size)} inputs, so that one grid serves all."
    )
    if parsed.method in CALIBRATED:
        text += f" {parsed.method} chooses codes on this grid, not always the nearest"
        text += ", after it has scaled the inputs' columns." if parsed.method == "awq" else "."
    if found.zero_steps:
        text += f" {formatting.count(found.zero_steps)} groups of equal weights are left out."
    st.caption(notes.plain(text))


def _has_grid(row: Any) -> bool:
    if row["variant"] == REFERENCE or row["problem"]:
        return False
    try:
        return parse_variant(row["variant"]).quantization.method is not None
    except ServeLabError:
        return False
