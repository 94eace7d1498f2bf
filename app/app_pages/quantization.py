"""Quantization: what a model gains and loses by fewer bits, method beside method. `/quantization?run=12&with=11`"""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import (
    quantization_form,
    quantization_layers,
    quantization_ranges,
    quantization_run,
    quantization_sensitivity,
    quantization_take_away,
)
from app.components.quantization_scans import RANGES, SENSITIVITY, VIEW

services = resources.get_services()

st.title("Quantization", anchor=False)
st.caption("What a model gains in memory and speed by fewer bits, and what it loses, method beside method.")

_ = services.queue  # prepares the surroundings that torch is imported in
quantization_form.show(services)
run, beside = quantization_run.pick(services)
if run is None:
    st.info(
        "Nothing measured yet. **Measure** stores the model in each of these ways and reads a text with it, beside the model "
        "as it is; figures appear here as they come.",
        icon=":material/compress:",
    )
else:
    results = quantization_run.show(services, run, beside)
    if results:
        views = st.tabs(
            ["Layers", "Weights", SENSITIVITY, RANGES, "Take it away"], key=VIEW, on_change="rerun", bind="query-params"
        )
        if views[0].open:
            with views[0]:
                quantization_layers.errors(results)
        if views[1].open:
            with views[1]:
                quantization_layers.weights(run, results)
        if views[2].open:
            with views[2]:
                quantization_sensitivity.show(services, run, results)
        if views[3].open:
            with views[3]:
                quantization_ranges.show(services, run, results)
        if views[4].open:
            with views[4]:
                quantization_take_away.show(services, run, results)
quantization_take_away.explanation()
