"""Compare: finished runs side by side, against one of them. `/compare?runs=12,13&baseline=12`"""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import links, run_compare

services = resources.get_services()

st.title("Compare", anchor=False)
st.caption("What changed between runs, and what it did to their figures.")

finished = services.repository.list(statuses={"finished"}, kind="serve")
if len(finished) < 2:
    st.info(
        f"Comparing takes two finished runs; there {'is one' if finished else 'are none'} so far.",
        icon=":material/compare_arrows:",
    )
    links.run_link()
else:
    chosen, baseline = run_compare.pick(services.repository, finished)
    if len(chosen) < 2:
        st.info("Choose at least two runs above.", icon=":material/checklist:")
        newest = sorted(run.run_id for run in finished[:2])
        links.compare_link(newest, f"Compare the newest two, #{newest[0]} and #{newest[1]}")
    else:
        run_compare.show(services.repository, chosen, baseline)
