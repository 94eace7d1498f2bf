"""Where the pages are, and links between them. Every view has an address; what is selected is part of it."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from app.state import address_of
from db.run_rows import Run

HOME = "app_pages/home.py"
RUN = "app_pages/run.py"
PLAYGROUND = "app_pages/playground.py"
HISTORY = "app_pages/history.py"
DETAIL = "app_pages/detail.py"
COMPARE = "app_pages/compare.py"
KERNELS = "app_pages/kernels.py"
QUANTIZATION = "app_pages/quantization.py"
KV_CACHE = "app_pages/kv_cache.py"
SCHEDULER = "app_pages/scheduler.py"
SIZING = "app_pages/sizing.py"
SPECULATION = "app_pages/speculation.py"


def run_link(label: str = "Start a run") -> None:
    st.page_link(RUN, label=label, icon=":material/play_arrow:")


def history_link(label: str = "All runs") -> None:
    st.page_link(HISTORY, label=label, icon=":material/history:")


def detail_link(run_id: int, label: str | None = None) -> None:
    st.page_link(
        DETAIL, label=label or f"Details of #{run_id}", icon=":material/query_stats:", query_params={"run": str(run_id)}
    )


def lab_place(run: Run) -> tuple[str, dict[str, str]] | None:
    """The page of a lab's run, and the query that leads to it there; None for a workload's run."""
    query = {"run": str(run.run_id)}
    match run.kind:
        case "kernels":
            view = {"view": "Attention over length"} if set(run.config["experiments"]) == {"attention"} else {}
            return KERNELS, query | view
        case "quantization":
            return QUANTIZATION, query
        case "certificate":
            return SPECULATION, query
    return None


def lab_link(run: Run) -> None:
    """To a lab's run on its page."""
    if place := lab_place(run):
        name, icon = {
            "kernels": ("Kernel run", ":material/speed:"),
            "quantization": ("Quantization run", ":material/compress:"),
            "certificate": ("Certificate", ":material/bolt:"),
        }[run.kind]
        st.page_link(place[0], label=f"{name} #{run.run_id}", icon=icon, query_params={"run": str(run.run_id)})


def kv_cache_link(run_id: int, label: str = "KV blocks", request: str | None = None) -> None:
    """With a request, as the page names it, to what the prefix cache had of its prompt."""
    query = {"run": str(run_id)} | ({} if request is None else {"request": request})
    st.page_link(KV_CACHE, label=label, icon=":material/grid_on:", query_params=query)


def scheduler_link(run_id: int, label: str = "Schedule", beside: int | None = None) -> None:
    query = {"run": str(run_id)} | ({} if beside is None else {"beside": str(beside)})
    st.page_link(SCHEDULER, label=label, icon=":material/view_timeline:", query_params=query)


def speculation_link(run_id: int, label: str = "Speculation") -> None:
    st.page_link(SPECULATION, label=label, icon=":material/bolt:", query_params={"run": str(run_id)})


def compare_link(run_ids: Sequence[int], label: str) -> None:
    st.page_link(COMPARE, label=label, icon=":material/compare_arrows:", query_params={"runs": address_of(run_ids)})
