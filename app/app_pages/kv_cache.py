"""KV cache: which block of the pool holds what, at any step of a run. `/kv-cache?run=12&step=340`"""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import kv_cache_source, kv_cache_view, links

services = resources.get_services()

st.title("KV cache", anchor=False)
st.caption("Which block of the pool holds what, at any step of a run, and how much of it is wasted or shared.")

run = kv_cache_source.pick(services)
if run is None:
    st.info("Nothing has run yet. The blocks of a run appear here from its first step on.", icon=":material/grid_on:")
    links.run_link()
else:
    kv_cache_view.show(services, run)
kv_cache_view.explanation()
