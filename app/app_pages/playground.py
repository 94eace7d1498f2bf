"""Playground: a conversation with the loaded model. `/playground?chat=rD3kQ0xA`"""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import playground_view

services = resources.get_services()

st.title("Playground", anchor=False)
st.caption("Talk with the loaded model: what it answers, how fast, and where each of its tokens came from.")
playground_view.show(services, playground_view.pick(services))
