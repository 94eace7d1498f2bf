"""Speculation: which drafted tokens the model accepted, what that was worth, and whether its answers are the same.

`/speculation?run=12&request=4&round=41`, `/speculation?run=12&view=Speedup&with=11`
"""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import (
    links,
    speculation_certificate,
    speculation_pick,
    speculation_proposers,
    speculation_speedup,
    speculation_view,
)
from app.components.speculation_pick import CERTIFICATES, PROPOSERS, ROUNDS, SPEEDUP, VIEW

services = resources.get_services()

st.title("Speculation", anchor=False)
st.caption(
    "Which drafted tokens of a run its model accepted, what that was worth, and whether its answers stay the same."
)

run = speculation_pick.pick(services)
if run is None:
    st.info(
        "No workload has run yet. The rounds of a run that speculates appear here: choose who drafts on the Run page.",
        icon=":material/bolt:",
    )
    links.run_link()
views = st.tabs([ROUNDS, SPEEDUP, PROPOSERS, CERTIFICATES], key=VIEW, on_change="rerun", bind="query-params")
if views[0].open and run is not None:
    with views[0]:
        speculation_view.show(services, run)
if views[1].open and run is not None:
    with views[1]:
        source = speculation_view.source_of(services, run)
        if source is not None:
            speculation_speedup.show(services, source)
if views[2].open and run is not None:
    with views[2]:
        speculation_proposers.show(services, run)
if views[3].open:
    with views[3]:
        speculation_certificate.show(services, run)
speculation_pick.write_address()
speculation_view.explanation()
