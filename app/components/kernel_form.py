"""What starts the kernel lab, and how far it is."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app.components import activity, links, live_panel, notes
from app.services import Services, start_kernel_run, start_run
from backend.errors import ServeLabError
from backend.experiments.kernel_config import DTYPES, KernelLabConfig
from backend.experiments.kernel_graphs import LABELS, graph_settings
from backend.experiments.kernel_lab import OpInfo

RUN = "kernel-run"  # the run that the page shows, in the session
ADDRESS = "kernel-address"

_ERROR = "kernel error"
_OPS, _DTYPE, _IMPLEMENTATION, _LABEL = "kernel-ops", "kernel-dtype", "kernel-implementation", "kernel-label"
_IMPLEMENTATIONS = {"both": "kernel and reference", "launch": "Triton kernel", "reference": "torch reference"}


def show(services: Services, ops: list[OpInfo], on_cuda: bool) -> None:
    with st.container(border=True, key="kernel-form"):
        with st.grid(6, min_column_width=140, vertical_alignment="bottom") as grid:
            with grid.cell(column_span=3):
                st.multiselect(
                    "Ops",
                    [op.name for op in ops],
                    key=_OPS,
                    placeholder="all",
                    help="Fewer are done sooner.",
                    persist_state="session",
                )
            st.selectbox(
                "Dtype",
                DTYPES if on_cuda else [dtype for dtype in DTYPES if dtype != "bfloat16"],
                index=None,
                placeholder="bfloat16" if on_cuda else "float32",
                key=_DTYPE,
                help="Half the bits move in half the time. A CPU checks float32 and float16 only.",
                persist_state="session",
            )
            st.selectbox(
                "Timed",
                list(_IMPLEMENTATIONS) if on_cuda else ["reference"],
                format_func=lambda name: _IMPLEMENTATIONS[name],
                key=_IMPLEMENTATION,
                help="The reference shows what the kernel gains. Kernels are timed on a GPU only.",
                persist_state="session",
            )
            st.text_input("Label", key=_LABEL, placeholder="optional", persist_state="session")
        with st.container(horizontal=True, vertical_alignment="center"):
            activity.start_button(
                services,
                "Check and time",
                key="kernel-start",
                why_queue="Waits for the run under way: nothing else may use the device while it is timed.",
                on_click=start,
                args=(services, ("check", "bench")),
            )
    if error := st.session_state.pop(_ERROR, None):
        st.error(notes.plain(error), icon=":material/error:")
    activity.polled(
        services.queue.live, activity.is_active, lambda snapshot: _under_way(services, snapshot), live_panel.POLL_S
    )


def start(services: Services, experiments: tuple[str, ...]) -> None:
    """Queue a run of the lab with the form's values, and show it. A callback: it runs before the page is drawn."""
    state = st.session_state
    try:
        config = KernelLabConfig.from_dict(
            {
                "experiments": experiments,
                "ops": state.get(_OPS) or None if "attention" not in experiments else None,
                "dtype": state.get(_DTYPE),
                "implementation": state.get(_IMPLEMENTATION) or "both",
            }
        )
        run_id = start_kernel_run(services, config, (state.get(_LABEL) or "").strip() or None)
        if "attention" not in experiments:
            state[RUN], state[ADDRESS] = run_id, None
    except ServeLabError as error:
        state[_ERROR] = str(error)


def start_graphs(services: Services, model: str) -> None:
    """Queue the two runs of `kernel_graphs`; a callback."""
    try:
        configs, workload = graph_settings(model)
        for eager, config in configs.items():
            start_run(services, config, workload, LABELS[eager])
    except ServeLabError as error:
        st.session_state[_ERROR] = str(error)


def _under_way(services: Services, snapshot: Any) -> None:
    if not activity.is_active(snapshot):
        return
    live_panel.progress(services, snapshot)
    run = services.repository.get(snapshot.run_id)
    if run is not None and run.kind == "serve":
        links.detail_link(snapshot.run_id, "A workload runs; the lab waits until the device is free.")
    live_panel.queue(services)
