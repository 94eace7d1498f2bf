"""Run detail: what one run was asked, how it was served, and what it ran on. `/detail?run=12`"""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import links, run_detail
from db.run_ids import parse_run_id

services = resources.get_services()
asked = st.query_params.get("run")
run_id = parse_run_id(asked or "")
run = services.repository.get(run_id) if run_id is not None else None

if run is not None and (place := links.lab_place(run)) is not None:
    st.switch_page(place[0], query_params=place[1])
elif run is not None:
    run_detail.show(services, run)
else:
    st.title("Run detail", anchor=False)
    if not asked:
        st.info(
            "This page shows one run. Choose it in History, or add `?run=12` to the address.", icon=":material/link:"
        )
    elif run_id is None:
        st.error("The address asks for a run by something that is no run id; an id is a number, as in `?run=12`.")
    else:
        st.error(f"There is no run #{run_id}. It may have been deleted.", icon=":material/search_off:")
    links.history_link()
