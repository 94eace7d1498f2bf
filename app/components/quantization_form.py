"""What starts the quantization lab, and how far it is."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import formatting
from app.components import activity, links, live_panel, notes, quantization_matrix
from app.services import Services, start_quantization_run
from backend.config import DEFAULT_MODEL
from backend.errors import ServeLabError
from backend.experiments.quantization_checkpoints import fitting_checkpoints
from backend.experiments.quantization_config import DEFAULT_VARIANTS, QuantizationLabConfig, variant_name
from backend.experiments.quantization_results import wholes
from backend.models.sources import list_models

RUN = "quantization-run"  # the run that the page shows, in the session
ADDRESS = "quantization-address"

_ERROR = "quantization error"
_MODEL, _VARIANTS, _TEXT, _TOKENS, _CALIBRATION = (
    f"quantization-{name}" for name in ("model", "variants", "text", "tokens", "calibration")
)
_LAYERS, _SPEED, _LABEL = (f"quantization-{name}" for name in ("layers", "speed", "label"))
_MORE = (
    "int4:bits=3",
    "gptq:bits=3",
    "int4:zero_point=none",
    "int4:group_size=32,zero_point=integer",
    "fp8:granularity=tensor",
    "int4:group_size=32,zero_point=float",
    "int4:group_size=32,zero_point=integer,head=int8",
)
_MAX_SEARCHED = 50


def show(services: Services) -> None:
    state = st.session_state
    defaults = QuantizationLabConfig().to_dict()
    for key, value in (
        (_MODEL, DEFAULT_MODEL),
        (_VARIANTS, list(DEFAULT_VARIANTS)),
        (_TOKENS, defaults["max_tokens"]),
        (_LAYERS, True),
        (_SPEED, True),
    ):
        state.setdefault(key, value)
    with st.container(border=True, key="quantization-form"):
        with st.grid(4, min_column_width=200) as grid:
            models = [info.name for info in list_models() if info.quantization is None]
            st.selectbox(
                "Model",
                models if state[_MODEL] in models else [state[_MODEL], *models],
                key=_MODEL,
                accept_new_options=True,
                help="A model's name, or a folder in Hugging Face's layout; not one that is quantized already.",
                persist_state="session",
            )
            with grid.cell(column_span=3):
                st.multiselect(
                    "Variants",
                    list(
                        dict.fromkeys(
                            (*DEFAULT_VARIANTS, *_MORE, *fitting_checkpoints(state[_MODEL] or ""), *state[_VARIANTS])
                        )
                    ),
                    format_func=variant_name,
                    key=_VARIANTS,
                    accept_new_options=True,
                    placeholder="choose, or type METHOD:OPTION=VALUE,...",
                    help="Each is measured beside the model as it is. gptq and awq are made as checkpoints first, once. Stored "
                    "quantized models of its shape are among them. Type others, as in int4:bits=3,group_size=32 or "
                    "none:kv=int4; head=int8 puts the output head in 8 bits too, skip=\\*.down_proj leaves layers out, and a "
                    "folder with a slash is a quantized model.",
                    persist_state="session",
                )
        with st.expander("Advanced", icon=":material/tune:"):
            _advanced()
        with st.container(horizontal=True, vertical_alignment="center"):
            activity.start_button(
                services,
                "Measure",
                key="quantization-start",
                why_queue="Waits for the run under way: nothing else may use the device meanwhile.",
                on_click=start,
                args=(services,),
            )
            st.caption(notes.plain(_last_time(services, state[_MODEL])), width="content")
    if error := state.pop(_ERROR, None):
        st.error(notes.plain(error), icon=":material/error:")
    activity.polled(
        services.queue.live, activity.is_active, lambda snapshot: _under_way(services, snapshot), live_panel.POLL_S
    )


def start(services: Services) -> None:
    """Queue a run with the form's values, and show it. A callback: it runs before the page is drawn."""
    state = st.session_state
    values: dict[str, Any] = {
        "model": (state[_MODEL] or "").strip(),
        "variants": list(state[_VARIANTS]),
        "text": (state.get(_TEXT) or "").strip() or None,
        "calibration": (state.get(_CALIBRATION) or "").strip() or None,
        "layers": state[_LAYERS],
        "speed": state[_SPEED],
    }
    if state[_TOKENS] is not None:
        values["max_tokens"] = state[_TOKENS]
    try:
        config = QuantizationLabConfig.from_dict(values)
        state[RUN] = start_quantization_run(services, config, (state.get(_LABEL) or "").strip() or None)
        state[ADDRESS] = None
    except ServeLabError as error:
        state[_ERROR] = str(error)


def start_scan(services: Services, config: dict[str, Any], changes: dict[str, Any]) -> None:
    """Queue a run that looks into a variant of the one with this config; a callback."""
    try:
        start_quantization_run(services, QuantizationLabConfig.from_dict(config | changes))
    except ServeLabError as error:
        st.session_state[_ERROR] = str(error)


def _advanced() -> None:
    with st.grid(3, min_column_width=200, vertical_alignment="bottom"):
        st.text_input(
            "Text",
            key=_TEXT,
            placeholder="the one that ships",
            help="A UTF-8 file on the server, such as WikiText-2's test set. The one that ships is no benchmark, and not the "
            "one that gptq and awq are calibrated on.",
            persist_state="session",
        )
        st.number_input(
            "Tokens",
            value=None,
            step=1024,
            key=_TOKENS,
            help="Of the text. More take longer and tell finer differences apart.",
            persist_state="session",
        )
        st.text_input(
            "Calibration text",
            key=_CALIBRATION,
            placeholder="the one that ships",
            help="A UTF-8 file on the server, or JSON lines with text or prompt, that gptq and awq choose their codes for: "
            "such as the model will be asked. 16 windows of 256 tokens are taken from all over it.",
            persist_state="session",
        )
        st.text_input("Label", key=_LABEL, placeholder="optional", persist_state="session")
        st.toggle("Layers", key=_LAYERS, help="Also each layer's error, for the heat map.", persist_state="session")
        st.toggle("Speed", key=_SPEED, help="Also tokens per second, of an engine.", persist_state="session")


def _last_time(services: Services, model: str) -> str:
    """How long a finished run of the same model took."""
    for run in services.repository.list(kind="quantization", models={model}, limit=_MAX_SEARCHED):
        if run.status == "finished" and run.config["experiment"] == "compare" and run.started_at and run.ended_at:
            seconds = (run.ended_at - run.started_at).total_seconds()
            count = len(run.config["variants"])
            return f"Last time {count} variant{'s' if count > 1 else ''} took {formatting.duration(seconds)} (#{run.run_id})."
    return "The default model with these variants takes a few minutes on two CPU cores."


def _under_way(services: Services, snapshot: Any) -> None:
    if not activity.is_active(snapshot):
        return
    live_panel.progress(services, snapshot)
    run = services.repository.get(snapshot.run_id)
    if run is not None and run.kind == "serve":
        links.detail_link(snapshot.run_id, "A workload runs; the lab waits until the device is free.")
    elif wholes(results := services.repository.quantization_results(snapshot.run_id)):
        quantization_matrix.show(results)
    live_panel.queue(services)
