"""Sizing: how large a model's KV cache is, and what fits a card. `/sizing?llm=Llama-3-8B&prompt=4000`"""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import notes, sizing_allocated, sizing_form, sizing_view
from app.components import sizing_state as state
from app.components.sizing_figures import size_up
from app.components.sizing_models import sized_model
from backend.errors import ModelError

services = resources.get_services()

st.title("Sizing", anchor=False)
st.caption("How large the KV cache is, how many requests fit a card, and where each number comes from.")

values = sizing_form.show()
if values[state.MODEL] == state.PASTED and not (values[state.CONFIG] or "").strip():
    st.info(
        "Paste a model's config.json above; the figures appear when it can be read.", icon=":material/content_paste:"
    )
else:
    try:
        model = sized_model(values[state.MODEL], values[state.CONFIG])
        sizing = size_up(model.config, values, sizing_form.cards()[values[state.CARD]])
    except (ModelError, ValueError) as error:
        st.error(notes.plain(f"{error}."), icon=":material/error:")
    else:
        sizing_view.show(model, values, sizing)
sizing_allocated.show(services, values[state.MODEL])
sizing_view.explanation()
