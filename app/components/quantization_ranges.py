"""Below the matrix: how far the values in a variant and in the original reach, and which channels reach beyond the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import notes, quantization_scan_charts, quantization_scans
from app.quantization_texts import place_text
from app.services import Services
from backend.experiments.quantization_config import REFERENCE, variant_name
from backend.experiments.quantization_ranges import by_tail, codes_left, furthest, stored_ranges, tail
from backend.experiments.ranges import ACTIVATIONS, EXPECTED_ORDER, Range, order, summarize_ranges
from db.run_rows import Run

_MOST_NAMED = 8
_HELP = "One pass over the first window of the text for the model as it was, and one for the variant, with a look at each weight."


def show(services: Services, run: Run, results: Sequence[Any]) -> None:
    """The newest measurement of the chosen variant, beside the reference of the same run; the button that measures."""
    losses = quantization_scans.variants_of(results)
    if not losses:
        st.info("No variant of this run has quantized layers.", icon=":material/straighten:")
        return
    scans = quantization_scans.find(services, run, experiment="ranges")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        variant = quantization_scans.choose_variant(losses, scans)
        quantization_scans.button(services, run, "Measure ranges", _HELP, experiment="ranges", variants=[variant])
    if variant not in scans:
        st.info(
            "Not measured yet. **Measure ranges** finds how far weights, activations, keys and values, and attention logits "
            "reach in each layer, and names the channels that reach beyond the rest.",
            icon=":material/straighten:",
        )
        return
    found = quantization_scans.newest_rows(services, scans[variant], variant)
    if found is None:
        return
    scan, rows = found
    ranges, original = stored_ranges(rows, variant), stored_ranges(rows, REFERENCE)
    _say_what_it_says(variant_name(variant), ranges, original)
    with st.container(key="quantization-reaches"), st.grid(2, min_column_width=340):
        for group in EXPECTED_ORDER:
            chart = quantization_scan_charts.reach(group, furthest(ranges, group), furthest(original, group))
            st.altair_chart(chart, key=f"quantization-reach-{group}")
    _groups(ranges, original)
    _outliers(ranges, original)
    st.caption(notes.plain(quantization_scans.source_text(scan, rows[0]["num_tokens"])))


def _say_what_it_says(name: str, ranges: Sequence[Range], original: Sequence[Range]) -> None:
    found, expected = order(summarize_ranges(ranges)), list(EXPECTED_ORDER)
    sentences = [f"Of {name}, by what 99.9 % of the values stay below: {' < '.join(found)}"]
    sentences[0] += (
        ", as is commonly expected." if found == expected else f"; commonly expected is {' < '.join(expected)}."
    )
    outliers = by_tail([each for each in original if each.group == ACTIVATIONS])
    if outliers:
        worst = outliers[0]
        codes = codes_left(worst)
        sentences.append(
            f"Of the original's activations those of layer {worst.layer} ({place_text(worst)}) reach furthest beyond the rest, "
            f"{formatting.number(tail(worst))} times as far as 99.9 % of them: in 8 bits with one scale, "
            + ("all of those would become 0." if codes == 1 else f"those would share {codes} of the 255 codes.")
        )
    st.markdown(notes.plain(" ".join(sentences)))


def _groups(ranges: Sequence[Range], original: Sequence[Range]) -> None:
    """A row for each group: the variant's figures, and how the largest compares with the original's."""
    bases = {group.group: group for group in summarize_ranges(original)}
    table = pd.DataFrame(
        [
            {
                "Values": group.group,
                "Largest": _rounded(group.max_abs),
                "Of the original": _rounded(bases[group.group].max_abs),
                "Where": f"layer {group.layer}, {place_text(group)}",
                "99.9 %, median layer": _rounded(group.p999),
                "Kurtosis, median layer": _rounded(group.kurtosis),
            }
            for group in summarize_ranges(ranges)
        ]
    )
    st.dataframe(table, hide_index=True, lazy=False, height="content", key="quantization-range-groups")
    st.caption("Absolute values. The kurtosis of a normal distribution is 3: what is above has heavier tails.")


def _outliers(ranges: Sequence[Range], original: Sequence[Range]) -> None:
    """The places of the original whose largest value is furthest beyond the rest, and what the variant has there."""
    there = {(each.group, each.layer, each.part): each for each in ranges}
    st.markdown(
        "**Outlier channels** of the original: where the largest value is furthest beyond 99.9 % of the others."
    )
    table = pd.DataFrame(
        [
            {
                "Values": each.group,
                "Layer": each.layer,
                "Where": place_text(each),
                "Largest": _rounded(each.max_abs),
                "Times its 99.9 %": _rounded(tail(each)),
                "Of the variant": _rounded(there[each.group, each.layer, each.part].max_abs),
            }
            for each in by_tail(original)[:_MOST_NAMED]
        ]
    )
    st.dataframe(table, hide_index=True, lazy=False, height="content", key="quantization-range-outliers")


def _rounded(value: float | None) -> float | None:
    """To three digits, for a column of numbers."""
    return None if value is None else float(f"{value:.3g}")
