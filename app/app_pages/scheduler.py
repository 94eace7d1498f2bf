"""Scheduler: which request ran in which step, and what it waited for. `/scheduler?run=12&beside=13&request=4`"""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import links, scheduler_pick, scheduler_view

services = resources.get_services()

st.title("Scheduler", anchor=False)
st.caption("Which request ran in which step of a run, what it waited for, and what each step was made of.")

runs = scheduler_pick.pick(services)
if not runs:
    st.info(
        "Nothing has run yet. The schedule of a run appears here from its first step on.",
        icon=":material/view_timeline:",
    )
    links.run_link()
else:
    scheduler_view.show(services, runs)
scheduler_view.explanation()
