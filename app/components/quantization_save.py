"""A variant of the quantization lab stored as a model like any other: what starts it, and what has become of it."""

from __future__ import annotations

import re
from pathlib import Path

import streamlit as st

from app import formatting
from app.components import activity, links, notes, widgets
from app.services import Services, start_quantization_run
from app.state import fill_form
from backend.config import EngineConfig
from backend.errors import ServeLabError
from backend.experiments.quantization_checkpoints import why_not_saved
from backend.experiments.quantization_config import QuantizationLabConfig, Variant
from backend.models.pull import PULLABLE
from backend.models.store import is_complete, stored_names
from backend.workload.spec import Workload
from db.run_rows import Run

_NAME, _FOR = "quantization-save-name", "quantization-save-for"
_ERROR = "quantization save error"
_MAX_SEARCHED = 200
_MAX_NAME = 90  # characters, to which a number may come


def show(services: Services, run: Run, text: str, variant: Variant) -> None:
    """A name and the button, or why there is none; below, the newest try.

    Args:
        text: the variant as the run has it.
    """
    if problem := why_not_saved(variant):
        st.caption(notes.plain(problem))
        return
    state = st.session_state
    newest = _newest(services, run, text)
    is_done = newest is not None and newest.status == "finished" and newest.config["name"] == state.get(_NAME)
    if state.get(_FOR) != (run.model, text) or _NAME not in state or is_done:
        state[_FOR], state[_NAME] = (run.model, text), default_name(run.model, variant)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.text_input(
            "Name",
            key=_NAME,
            width=320,
            help="What the model is called from then on, wherever one is chosen and on the command line.",
        )
        activity.start_button(
            services,
            "Save as a model",
            key="quantization-save",
            why_queue="Waits for the run under way: nothing else may use the device meanwhile.",
            on_click=_start,
            args=(services, run, text),
        )
    if variant.cache_dtype != "auto":
        st.caption("Without its KV cache, which is no part of a checkpoint.")
    if error := state.pop(_ERROR, None):
        st.error(notes.plain(error), icon=":material/error:")
    elif newest is not None:
        _show_try(services, newest, variant)


def default_name(model: str, variant: Variant) -> str:
    """Such as `smollm2-135m-int4-g32`, with a number where that is taken."""
    settings = variant.quantization
    parts = [Path(model).name, variant.method or ""]
    parts += [f"{settings.bits}bit"] if settings.bits is not None else []
    if settings.group_size is not None:
        parts.append("channel" if settings.group_size == -1 else f"g{settings.group_size}")
    parts += ["symmetric"] if settings.zero_point == "none" else []
    parts += [settings.granularity] if settings.granularity else []
    parts += [f"head-{settings.head}"] if settings.head else []
    parts += ["partly"] if settings.skip else []
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).strip("._-").lower()[:_MAX_NAME]
    taken, number = {*stored_names(), *PULLABLE}, 2
    found = name
    while found in taken:
        found, number = f"{name}-{number}", number + 1
    return found


def save_text(run: Run) -> str:
    """What a run that saves a variant has done, or is about."""
    name = run.config["name"]
    match run.status:
        case "finished":
            return f"saved the model {name}."
        case "failed" | "cancelled" | "interrupted":
            return f"was to save the model {name}, and {run.status if run.status == 'failed' else f'was {run.status}'}."
    return f"is to save the model {name}."


def _start(services: Services, run: Run, text: str) -> None:
    """A callback: it runs before the page is drawn."""
    name = (st.session_state.get(_NAME) or "").strip()
    try:
        config = QuantizationLabConfig.from_dict(
            {
                "model": run.model,
                "experiment": "save",
                "variants": [text],
                "name": name,
                "calibration": run.config.get("calibration"),
            }
        )
        start_quantization_run(services, config)
    except ServeLabError as error:
        st.session_state[_ERROR] = str(error)


def _newest(services: Services, measured: Run, text: str) -> Run | None:
    """The newest run that saves this variant as that run has it."""
    calibration = measured.config.get("calibration")
    for run in services.repository.list(kind="quantization", models={measured.model}, limit=_MAX_SEARCHED):
        config = run.config
        if config["experiment"] == "save" and config["variants"] == [text] and config.get("calibration") == calibration:
            return run
    return None


def _show_try(services: Services, run: Run, variant: Variant) -> None:
    name = run.config["name"]
    if not run.is_final:
        st.info(
            notes.plain(f"Run {run.title} {save_text(run)} How far it is stands above."),
            icon=":material/hourglass_top:",
        )
    elif run.status != "finished":
        st.caption(notes.plain(f"Run {run.title} {save_text(run)}"))
        notes.failure(run.status, run.error)
    elif not is_complete(name):
        st.caption(notes.plain(f"Run {run.title} {save_text(run)} It is there no more."))
    else:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.success(
                notes.plain(f"{name} is a model now: choose it wherever one is chosen. {_when(run)}"),
                icon=":material/check_circle:",
            )
            if st.button("Run it", icon=":material/play_arrow:", key="quantization-save-run"):
                config = EngineConfig.from_dict({"model": {"name": name}, "cache": {"dtype": variant.cache_dtype}})
                widgets.fill(fill_form(config, Workload(), name))
                st.switch_page(links.RUN, query_params={})


def _when(run: Run) -> str:
    seconds = (run.ended_at - run.started_at).total_seconds() if run.started_at and run.ended_at else None
    return f"Run {run.title}, {formatting.timestamp(run.created_at)}" + (
        "." if seconds is None else f", {formatting.duration(seconds)}."
    )
