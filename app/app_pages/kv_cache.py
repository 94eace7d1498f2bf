"""KV cache: which block of the pool holds what, at any step of a run, and what its prefix cache did.

`/kv-cache?run=12&step=340`, `/kv-cache?run=12&request=7`
"""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import kv_cache_prefix, kv_cache_source, kv_cache_view, links
from app.components.kv_cache_source import BLOCKS, PREFIX_CACHE, VIEW

services = resources.get_services()

st.title("KV cache", anchor=False)
st.caption(
    "Which block of the pool holds what, at any step of a run, how much of it is wasted or shared, and why a prompt was not "
    "found in the cache."
)

run = kv_cache_source.pick(services)
if run is None:
    st.info("Nothing has run yet. The blocks of a run appear here from its first step on.", icon=":material/grid_on:")
    links.run_link()
    kv_cache_view.explanation()
else:
    views = st.tabs([BLOCKS, PREFIX_CACHE], key=VIEW, on_change="rerun", bind="query-params")
    if views[0].open:
        with views[0]:
            kv_cache_view.show(services, run)
            kv_cache_view.explanation()
    if views[1].open:
        with views[1]:
            kv_cache_prefix.show(services, run)
            kv_cache_prefix.explanation()
