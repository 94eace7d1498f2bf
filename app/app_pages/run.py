"""Run: one workload against one engine, configured, started and watched."""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import live_panel, run_form

services = resources.get_services()

st.title("Run", anchor=False)
st.caption("Send a workload to an engine and watch how it is served; every run is recorded.")
run_form.show(services)
live_panel.show(services)
