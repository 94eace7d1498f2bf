"""Below the matrix: what a part of a variant's layers costs alone, the rest of the model being as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import notes, quantization_scan_charts, quantization_scans
from app.components.quantization_scans import BY, BY_NAMES
from app.quantization_texts import KIND_TITLES
from app.services import Services
from backend.experiments.layer_error import ALL
from backend.experiments.quantization_results import scanned_layers
from db.run_rows import Run

_MOST_NAMED = 8
_PASSES: dict[str, str] = {
    "kind": "Six passes over the first window of the text: the reference, each kind of layer quantized alone, and all.",
    "layer": "A pass over the first window of the text for each linear layer, two more for none and for all: minutes on a CPU.",
}


def show(services: Services, run: Run, results: Sequence[Any]) -> None:
    """The newest scan of the chosen variant, by kind or by layer as it is chosen; the button that scans."""
    losses = quantization_scans.variants_of(results, comparable=True)
    if not losses:
        st.info("No variant of this run has layers that can be exchanged one by one.", icon=":material/tune:")
        return
    scans: dict[str, dict[str, list[Run]]] = {
        by: quantization_scans.find(services, run, experiment="sensitivity", by=by) for by in BY_NAMES
    }
    with st.container(horizontal=True, vertical_alignment="bottom"):
        variant = quantization_scans.choose_variant(losses, scans["kind"] | scans["layer"])
        by = _choose_part([by for by in BY_NAMES if variant in scans[by]])
        quantization_scans.button(
            services, run, "Scan", _PASSES[by], experiment="sensitivity", by=by, variants=[variant]
        )
    if variant not in scans[by]:
        one = "kind of layer" if by == "kind" else "linear layer"
        st.info(
            f"Not scanned yet. **Scan** quantizes one {one} at a time and leaves the others as they are.",
            icon=":material/tune:",
        )
        return
    found = quantization_scans.newest_rows(services, scans[by][variant], variant)
    if found is None:
        return
    scan, rows = found[0], [row for row in found[1] if row["variant"] == variant]
    with st.container(key="quantization-scanned"):
        if by == "kind":
            st.altair_chart(quantization_scan_charts.by_kind(rows), key="quantization-by-kind")
        else:
            _layers(rows)
    st.caption(notes.plain(quantization_scans.source_text(scan, rows[0]["num_tokens"])))


def _choose_part(scanned: Sequence[str]) -> str:
    """At first that which is scanned."""
    state = st.session_state
    if BY not in state and BY not in st.query_params:
        state[BY] = scanned[0] if scanned else "kind"
    chosen = st.segmented_control(
        "Quantized alone",
        list(BY_NAMES),
        format_func=lambda by: BY_NAMES[by],
        key=BY,
        required=True,
        width="content",
        bind="query-params",
    )
    return chosen or "kind"


def _layers(rows: Sequence[Any]) -> None:
    cells = scanned_layers(rows)
    st.altair_chart(quantization_scan_charts.by_layer(cells), key="quantization-by-layer")
    costs = sorted(cells, key=lambda cell: -cell["kl_mean"])
    whole = next((row["kl_mean"] for row in rows if row["part"] == ALL), None)
    few = costs[: max(1, len(costs) // 10)]
    total = sum(cell["kl_mean"] for cell in costs)
    if whole is not None and total > 0:
        share = sum(cell["kl_mean"] for cell in few) / total
        st.markdown(
            notes.plain(
                f"All layers together cost {formatting.number(whole)} nats; one by one they add up to "
                f"{formatting.number(total)}, of which the costliest {len(few)} of {len(costs)} have "
                f"{formatting.percent(share)}."
            )
        )
    table = pd.DataFrame(
        [
            {
                "Layer": cell["layer"],
                "Kind": KIND_TITLES[cell["kind"]],
                "KL, nats": float(f"{cell['kl_mean']:.3g}"),
                "Perplexity": float(f"{cell['perplexity']:.5g}"),
            }
            for cell in costs[:_MOST_NAMED]
        ]
    )
    st.dataframe(table, hide_index=True, lazy=False, height="content", width="content", key="quantization-costliest")
