"""The bare address leads to the Run page, so that every page has a name in its address."""

from __future__ import annotations

import streamlit as st

from app.components import links

st.switch_page(links.RUN, query_params=st.query_params.to_dict())
