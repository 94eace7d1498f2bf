"""Kernels: each op against its reference and against what the machine can do. `/kernels?run=12&with=11`"""

from __future__ import annotations

import streamlit as st

from app import resources
from app.components import kernel_experiments, kernel_form, kernel_run
from backend.experiments import kernel_lab

services = resources.get_services()

st.title("Kernels", anchor=False)
st.caption(
    "How close each op comes to what this machine can read and multiply, and whether its kernel agrees with its reference."
)

_ = services.queue  # prepares the surroundings that torch is imported in
on_cuda = kernel_lab.has_cuda()
kernel_form.show(services, kernel_lab.list_ops(), on_cuda)
views = st.tabs(["Ops", "Attention over length", "CUDA graphs"], key="view", on_change="rerun", bind="query-params")
if views[0].open:
    with views[0]:
        run, others = kernel_run.pick(services)
        if run is None:
            st.info(
                "Nothing measured yet. **Check and time** takes seconds: it compares every kernel with its reference, and "
                "times each op against this machine's own limits.",
                icon=":material/speed:",
            )
            st.caption(kernel_lab.triton_use())
        else:
            kernel_run.show(services, run, others)
if views[1].open:
    with views[1]:
        kernel_experiments.attention(services)
if views[2].open:
    with views[2]:
        kernel_experiments.graphs(services, on_cuda)
kernel_experiments.explanation()
