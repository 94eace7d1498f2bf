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
_CHOSEN = "quantization-by-chosen"  # the variant for which somebody has chosen what is quantized alone
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
        scanned = [by for by in BY_NAMES if variant in scans[by]]
        by = _choose_part(variant, scanned)
        quantization_scans.button(
            services, run, "Scan", _PASSES[by], experiment="sensitivity", by=by, variants=[variant]
        )
    if variant not in scans[by]:
        one = "kind of layer" if by == "kind" else "linear layer"
        text = f"Not scanned yet. **Scan** quantizes one {one} at a time and leaves the others as they are."
        for other in scanned:
            text += f" Run {notes.plain(scans[other][variant][0].title)} scanned it: **{BY_NAMES[other]}**."
        st.info(text, icon=":material/tune:")
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


def _choose_part(variant: str, scanned: Sequence[str]) -> str:
    """That which is scanned, until somebody chooses for the variant; an address that is opened is a choice."""
    state = st.session_state
    if _CHOSEN not in state:
        state[_CHOSEN] = variant if BY in st.query_params else None
    if state[_CHOSEN] != variant and (BY not in state or (scanned and state[BY] not in scanned)):
        state[BY] = scanned[0] if scanned else "kind"
    chosen = st.segmented_control(
        "Quantized alone",
        list(BY_NAMES),
        format_func=lambda by: BY_NAMES[by],
        key=BY,
        required=True,
        width="content",
        bind="query-params",
        on_change=_keep_choice,
        args=(variant,),
    )
    return chosen or "kind"


def _keep_choice(variant: str) -> None:
    st.session_state[_CHOSEN] = variant


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
                "KL, nats": cell["kl_mean"],
                "Perplexity": cell["perplexity"],
            }
            for cell in costs[:_MOST_NAMED]
        ]
    )
    # Without a format a column is cut to four decimals, in which small costs are all alike.
    formats = {"KL, nats": "%.3g", "Perplexity": "%.5g"}
    st.dataframe(
        table,
        hide_index=True,
        lazy=False,
        height="content",
        width="content",
        column_config={name: st.column_config.NumberColumn(format=text) for name, text in formats.items()},
        key="quantization-costliest",
    )
