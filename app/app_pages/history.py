"""History: every run, found by what is known of it, and what can be done with one or several."""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import links, run_actions, run_table
from backend.metrics.stats import FINAL_STATUSES

STATUSES = ("queued", "loading", "running", *sorted(FINAL_STATUSES))
LIMIT = 500

services = resources.get_services()
repository = services.repository

repository.mark_interrupted()  # a run may have lost its process since this one started

st.title("History", anchor=False)
st.caption("Every run, newest first. Tick runs to open, compare, export or delete them.")

with st.grid(3, min_column_width=200):
    text = st.text_input(
        "Search", key="text", type="search", placeholder="label, notes, model, or #12", bind="query-params"
    )
    statuses = st.multiselect("Status", STATUSES, key="status", placeholder="any", bind="query-params")
    models = st.multiselect("Model", repository.models(), key="model", placeholder="any", bind="query-params")

runs = repository.list(text=text or None, statuses=statuses or None, models=models or None, limit=LIMIT)

if not runs and not (text or statuses or models):
    st.info("No run yet. Each run, from here or from `servelab run`, gets a row here.", icon=":material/history:")
    links.run_link()
elif not runs:
    st.info("No run matches. Clear a filter to see more.", icon=":material/filter_alt_off:")
else:
    actions = st.container()
    selected = run_table.show(runs)
    with actions:
        run_actions.show(services, selected)
    if len(runs) == LIMIT:
        st.caption(f"The newest {LIMIT} are shown; narrow the search to see older ones.")
    if len(selected) == 1:
        run_actions.label_and_notes(services, selected[0])
