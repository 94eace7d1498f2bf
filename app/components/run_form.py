"""The form that starts a run. Untouched, it is `servelab run` without arguments."""

from __future__ import annotations

import time

import streamlit as st

from app import formatting
from app.components import activity, widgets
from app.components import form_fields as form
from app.services import Services, start_run
from app.state import read_form
from backend.errors import ServeLabError
from backend.models.sources import PULLABLE, ModelInfo, list_models

SAME_CLICK_S = 2.0  # a second press within this time, for the very same run, is the first one's echo

_ERROR = "form error"
_LAST_START = "last start"
_WITHOUT_TRACE = {kind: words for kind, words in form.ARRIVAL_KINDS.items() if kind != "trace"}
_MODEL_STATES = {
    "not pulled": "will be pulled",
    "damaged": "damaged, will be pulled again",
}


def show(services: Services) -> None:
    widgets.seed()
    with st.container(border=True, key="run-form"):
        with st.grid(6, min_column_width=140) as grid:
            with grid.cell(column_span=2):
                _model()
            widgets.choice(
                form.SOURCE,
                form.SOURCES,
                "Workload",
                "What is asked: text, or exact numbers of random tokens.",
                on_change=_arrive_as_source_does,
            )
            kinds = form.ARRIVAL_KINDS if widgets.value(form.SOURCE) in form.TRACES else _WITHOUT_TRACE
            widgets.choice(form.ARRIVALS, kinds, "Arrivals", "When: a burst shows throughput, a rate shows waiting.")
            if widgets.value(form.SOURCE) not in form.TRACES:
                widgets.length(form.OUTPUT_LEN, form.LENGTHS[form.OUTPUT_LEN])
            _temperature()
        _what_the_choices_ask()
        with st.expander("Advanced", icon=":material/tune:"):
            _advanced()
        _start_row(services)
        error = st.session_state.get(_ERROR)
        if error:
            st.error(error, icon=":material/error:")


def _arrive_as_source_does() -> None:
    """A trace that is chosen brings its times along; without one there are none."""
    has_times = widgets.value(form.SOURCE) in form.TRACES
    if widgets.value(form.ARRIVALS) == ("all_at_once" if has_times else "trace"):
        widgets.fill({form.ARRIVALS: "trace" if has_times else "all_at_once"})


def _model() -> None:
    models = {model.name: model for model in list_models()}
    chosen = widgets.value(form.MODEL)
    st.selectbox(
        "Model",
        [*models, *([chosen] if chosen and chosen not in models else [])],
        key=widgets.key_of(form.MODEL),
        accept_new_options=True,
        help="A model by name, or type the folder of a Hugging Face model of the Llama architecture.",
        persist_state="session",
    )
    # Not in the options' names: the box would go on showing the old one after a pull.
    if chosen in models and (text := _model_text(models[chosen])):
        st.caption(text)


def _model_text(model: ModelInfo) -> str:
    """What a start costs beyond loading; nothing for a model that is there."""
    if model.state not in _MODEL_STATES:
        return ""
    size_bytes = PULLABLE[model.name].wheel_bytes if model.name in PULLABLE else model.size_bytes
    return f"{_MODEL_STATES[model.state]} ({formatting.file_size(size_bytes)})"


def _temperature() -> None:
    widgets.setting(next(field for field in form.SAMPLING_FIELDS if field.key == form.TEMPERATURE))


def _what_the_choices_ask() -> None:
    """The fields of the chosen workload and arrivals; none for the defaults."""
    source, arrivals = widgets.value(form.SOURCE), widgets.value(form.ARRIVALS)
    fields = [field for field in form.SOURCE_FIELDS[source] if source != "built_in"]
    fields += form.ARRIVAL_FIELDS.get(arrivals, ())
    for field in fields:
        if field.kind == "text_list":
            widgets.setting(field)
    rest = [field for field in fields if field.kind != "text_list"]
    if not rest and source not in form.SOURCE_LENGTHS:
        return
    with st.grid(6, min_column_width=140, vertical_alignment="bottom"):
        for field in rest:
            widgets.setting(field)
        for key in form.SOURCE_LENGTHS.get(source, ()):
            widgets.length(key, form.LENGTHS[key])


def _advanced() -> None:
    source = widgets.value(form.SOURCE)
    st.markdown("**Workload**")
    with st.grid(4, min_column_width=180, vertical_alignment="bottom"):
        if source == "built_in":
            for field in form.SOURCE_FIELDS[source]:
                widgets.setting(field)
        for key in (*(() if source in form.TRACES else (form.OUTPUT_LEN,)), *form.SOURCE_LENGTHS.get(source, ())):
            widgets.length_kind(key)
        for field in (*form.RUN_FIELDS, *form.SLO_FIELDS):
            widgets.setting(field)
    st.markdown("**Sampling**")
    with st.grid(4, min_column_width=180, vertical_alignment="bottom"):
        for field in form.SAMPLING_FIELDS:
            if field.key != form.TEMPERATURE:
                widgets.setting(field)
    for title, fields in (("Engine", form.ENGINE_FIELDS), ("Speculation", form.SPECULATION_FIELDS)):
        st.markdown(f"**{title}**")
        with st.grid(4, min_column_width=180, vertical_alignment="bottom"):
            for field in fields:
                widgets.setting(field)
    st.text_area(
        "More settings",
        key=widgets.key_of(form.OVERRIDES),
        placeholder="cache.block_size = 32\nworkload.seed = 1",
        height=90,
        help="Any setting as `key = value`, one a line, as `servelab run --set` takes it. These lines win.",
        persist_state="session",
    )


def _start_row(services: Services) -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.text_input(
            "Label",
            key=widgets.key_of(form.LABEL),
            placeholder="Label (optional)",
            label_visibility="collapsed",
            width=260,
            persist_state="session",
        )
        activity.start_button(
            services,
            "Start",
            key="start",
            why_queue="Waits for the run under way, then starts.",
            on_click=_start,
            args=(services,),
        )


def _start(services: Services) -> None:
    """Runs before the page is drawn: the run is the queue's from here on, whatever becomes of this page."""
    st.session_state.pop(_ERROR, None)
    try:
        config, workload = read_form(widgets.values())
        label = (widgets.value(form.LABEL) or "").strip() or None
        asked = (config, workload, label)
        last, when = st.session_state.get(_LAST_START, (None, 0.0))
        if asked == last and time.monotonic() - when < SAME_CLICK_S:
            return
        start_run(services, config, workload, label)
        st.session_state[_LAST_START] = (asked, time.monotonic())
    except ServeLabError as error:
        st.session_state[_ERROR] = str(error)
