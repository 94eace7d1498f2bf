"""Below the matrix: layers' errors and outliers, a layer's weights on a method's grid, and which kind of layer costs most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import activity, notes, quantization_charts
from app.components.quantization_form import start_scan
from app.services import Services
from backend.errors import ServeLabError
from backend.experiments.layer_error import KINDS
from backend.experiments.quantization_config import CALIBRATED, REFERENCE, parse_variant, variant_name
from backend.experiments.quantization_results import layer_cells, outliers, wholes
from backend.experiments.weight_histogram import weight_histogram
from backend.models.sources import resolve_source
from db.run_rows import Run

_VARIANT, _LAYER, _KIND, _SCANNED = (f"quantization-weights-{name}" for name in ("variant", "layer", "kind", "scan"))
_MAX_SEARCHED = 200


def errors(results: Sequence[Any]) -> None:
    """Layer x method, the relative error of each layer's output; then the channels that stand out."""
    cells = layer_cells(results)
    if not cells:
        st.info("This run measured no layers. Leave **Layers** on, under Advanced.", icon=":material/grid_on:")
        return
    domain = quantization_charts.error_domain(cells)
    with st.container(key="quantization-heat"), st.grid(2, min_column_width=340):
        for kind in KINDS:
            if any(cell["kind"] == kind for cell in cells):
                st.altair_chart(quantization_charts.heat_map(cells, kind, domain), key=f"quantization-heat-{kind}")
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
                    "Kind": quantization_charts.KIND_TITLES[outlier.kind],
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
        kind = st.selectbox(
            "Kind", list(KINDS), format_func=lambda name: quantization_charts.KIND_TITLES[name], key=_KIND
        )
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
            title=f"Layer {int(layer or 0)}, {quantization_charts.KIND_TITLES[kind].lower()}: {variant_name(variant)}",
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


def sensitivity(services: Services, run: Run, results: Sequence[Any]) -> None:
    """What each kind of layer costs alone, from the newest scan of the variant; or the button that scans."""
    losses = {row["variant"]: row["kl_mean"] or 0.0 for row in wholes(results) if row["layers"]}
    variants = list(losses)
    if not variants:
        st.info("No variant of this run has layers that can be exchanged one by one.", icon=":material/tune:")
        return
    scans = _scans(services, run)
    if st.session_state.get(_SCANNED) not in variants:
        st.session_state[_SCANNED] = max(variants, key=lambda variant: (variant in scans, losses[variant]))
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox("Variant", variants, format_func=variant_name, key=_SCANNED, width=260)
        variant = chosen or variants[0]
        busy = activity.is_active(services.queue.live())
        st.button(
            "Add scan to queue" if busy else "Scan",
            icon=":material/queue:" if busy else ":material/play_arrow:",
            key="quantization-scan",
            help="Six passes over the first window of the text: the reference, each kind of layer quantized alone, and all.",
            on_click=start_scan,
            args=(services, run.config, variant),
        )
    if variant not in scans:
        st.info(
            "Not scanned yet. **Scan** quantizes one kind of layer at a time and leaves the others as they are.",
            icon=":material/tune:",
        )
        return
    scan, rows = scans[variant]
    st.altair_chart(quantization_charts.sensitivity(rows), key="quantization-sensitivity")
    tokens = formatting.count(rows[0]["num_tokens"])
    st.caption(notes.plain(f"Run {scan.title}, {tokens} tokens. {formatting.timestamp(scan.created_at)}."))


def _has_grid(row: Any) -> bool:
    if row["variant"] == REFERENCE or row["problem"]:
        return False
    try:
        return parse_variant(row["variant"]).quantization.method is not None
    except ServeLabError:
        return False


def _scans(services: Services, run: Run) -> dict[str, tuple[Run, list[Any]]]:
    """The newest scan of each variant of the run's model on its text, with its results."""
    found: dict[str, tuple[Run, list[Any]]] = {}
    for scan in services.repository.list(kind="quantization", models={run.model}, limit=_MAX_SEARCHED):
        if scan.config["experiment"] == "sensitivity" and scan.config["text"] == run.config["text"]:
            rows = [row for row in services.repository.quantization_results(scan.run_id) if row["part"] is not None]
            for variant in dict.fromkeys(row["variant"] for row in rows):
                found.setdefault(variant, (scan, [row for row in rows if row["variant"] == variant]))
    return found
