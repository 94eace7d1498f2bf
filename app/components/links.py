"""Where the pages are, and links between them. Every view has an address; what is selected is part of it."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app.state import address_of

HOME = "app_pages/home.py"
RUN = "app_pages/run.py"
HISTORY = "app_pages/history.py"
DETAIL = "app_pages/detail.py"
COMPARE = "app_pages/compare.py"
KERNELS = "app_pages/kernels.py"
KV_CACHE = "app_pages/kv_cache.py"
SCHEDULER = "app_pages/scheduler.py"
SIZING = "app_pages/sizing.py"


def run_link(label: str = "Start a run") -> None:
    st.page_link(RUN, label=label, icon=":material/play_arrow:")


def history_link(label: str = "All runs") -> None:
    st.page_link(HISTORY, label=label, icon=":material/history:")


def detail_link(run_id: int, label: str | None = None) -> None:
    st.page_link(
        DETAIL, label=label or f"Details of #{run_id}", icon=":material/query_stats:", query_params={"run": str(run_id)}
    )


def kernels_query(run_id: int, experiments: Sequence[str]) -> dict[str, str]:
    """What leads to a kernel run on its page, in the view that shows it."""
    view = {"view": "Attention over length"} if set(experiments) == {"attention"} else {}
    return {"run": str(run_id), **view}


def kernels_link(run_id: int, label: str | None = None) -> None:
    st.page_link(
        KERNELS, label=label or f"Kernel run #{run_id}", icon=":material/speed:", query_params={"run": str(run_id)}
    )


def kv_cache_link(run_id: int, label: str = "KV blocks", request: str | None = None) -> None:
    """With a request, as the page names it, to what the prefix cache had of its prompt."""
    query = {"run": str(run_id)} | ({} if request is None else {"request": request})
    st.page_link(KV_CACHE, label=label, icon=":material/grid_on:", query_params=query)


def scheduler_link(run_id: int, label: str = "Schedule", beside: int | None = None) -> None:
    query = {"run": str(run_id)} | ({} if beside is None else {"beside": str(beside)})
    st.page_link(SCHEDULER, label=label, icon=":material/view_timeline:", query_params=query)


def compare_link(run_ids: Sequence[int], label: str) -> None:
    st.page_link(COMPARE, label=label, icon=":material/compare_arrows:", query_params={"runs": address_of(run_ids)})
