"""What the Sizing page asks. The address holds it all; the session holds what is typed until the address does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import formatting
from app.components import notes
from app.components import sizing_state as state
from app.components.sizing_models import local_names
from app.components.sizing_state import Parameter
from backend.analysis.presets import CARD_PRESETS, MODEL_PRESETS
from backend.metrics.environment import environment

PREFIX = "sizing:"

_ADDRESS = "sizing-address"  # as this page wrote it last
_THIS_MACHINE = "here"
_MODEL_NAMES = {state.PASTED: "a config.json, pasted"}
_CARD_NAMES = {state.TYPED: "memory typed in"}


def cards() -> dict[str, int | None]:
    """Cards by name, with their bytes of memory, None for the one that is typed in; this machine's first."""
    machine = environment()
    here = {_THIS_MACHINE: machine["gpu_memory_bytes"]} if machine.get("gpu_memory_bytes") else {}
    return here | {name: card.memory_bytes for name, card in CARD_PRESETS.items()} | {state.TYPED: None}


def card_source(card: str) -> str:
    """Where a card's bytes are from."""
    if card in CARD_PRESETS:
        return CARD_PRESETS[card].source
    return f"{environment().get('gpu')}, as its driver says" if card == _THIS_MACHINE else "typed in"


def show() -> dict[str, Any]:
    """Draw the inputs and return them by their names in the address, which follows them."""
    known = state.parameters(tuple(cards()))
    if problems := _follow_address(known):
        text = f"The address asks for what cannot be, and the defaults are taken: {'; '.join(problems)}."
        st.warning(notes.plain(text), icon=":material/link_off:")
    with st.container(border=True, key="sizing-form"):
        with st.grid(4, min_column_width=150, vertical_alignment="top") as grid:
            with grid.cell(column_span=2):
                _model()
            with grid.cell(column_span=2):
                _card()
            _number(state.PROMPT, "Prompt tokens", "Tokens of a request before its first output token.")
            _number(state.OUTPUT, "Output tokens", "The cache grows by one token a step until there are so many.")
            _choice(state.KV_DTYPE, "KV dtype", "Element type of the cache. auto: the model's own.", known)
            _choice(
                state.WEIGHT_DTYPE,
                "Weight dtype",
                "auto: the config's. fp8, int8 and int4 are those of the linear layers; the rest stays bfloat16.",
                known,
            )
        if st.session_state[PREFIX + state.MODEL] == state.PASTED:
            _config()
        with (
            st.expander("Advanced", icon=":material/tune:"),
            st.grid(4, min_column_width=170, vertical_alignment="bottom"),
        ):
            _advanced()
    values = {name: st.session_state[PREFIX + name] for name in known}
    values[state.MODEL] = (values[state.MODEL] or "").strip() or known[state.MODEL].default
    _write_address(values, known)
    return values


def _model() -> None:
    names = [*MODEL_PRESETS, *local_names(), state.PASTED]
    chosen = st.session_state[PREFIX + state.MODEL]
    st.selectbox(
        "Model",
        [*names, *([chosen] if chosen not in names else [])],
        key=PREFIX + state.MODEL,
        format_func=_model_name,
        accept_new_options=True,
        help="A published model, one that is here, or the folder of a Hugging Face model, typed. For any other, paste its "
        "config.json.",
        persist_state="session",
    )


def _model_name(name: str) -> str:
    return _MODEL_NAMES.get(name, name)


def _card() -> None:
    st.selectbox(
        "Card",
        list(cards()),
        key=PREFIX + state.CARD,
        format_func=_card_name,
        help="All of its memory; what of it may be used is under Advanced.",
        persist_state="session",
    )
    if st.session_state[PREFIX + state.CARD] == state.TYPED:
        _number(state.CARD_GIB, "Card memory (GiB)", "GiB are 2^30 bytes.", as_type=float)


def _card_name(name: str) -> str:
    if name == _THIS_MACHINE:
        return f"this machine's {environment().get('gpu')}"
    return _CARD_NAMES.get(name, name)


def _config() -> None:
    st.text_area(
        "config.json",
        key=PREFIX + state.CONFIG,
        height=220,
        placeholder='{"model_type": "llama", "hidden_size": 4096, ...}',
        help="The config.json of a model on Hugging Face, whole. Only the fields that decide sizes are read.",
        persist_state="session",
    )
    if not state.fits_address(st.session_state[PREFIX + state.CONFIG] or ""):
        st.caption("This config is too long for the address: a link to this page will not carry it.")


def _advanced() -> None:
    _number(state.BLOCK_SIZE, "Block size (tokens)", "Small wastes less at a request's end, large needs fewer entries.")
    _number(
        state.UTILIZATION,
        "GPU memory share",
        "Of the card, for weights, activations and KV cache together (gpu_memory_utilization).",
        as_type=float,
        step=0.01,
    )
    _number(
        state.RESERVE_GIB,
        "Reserve for activations (GiB)",
        "The largest step's activations, CUDA graphs and the process' context: grows with tokens per step.",
        as_type=float,
    )
    _number(
        state.CONTEXT,
        "Context length",
        "Tokens that a contiguous reservation must be ready for. Empty: the model's.",
        placeholder="the model's",
    )
    _number(
        state.WEIGHTS_GIB,
        "Weights (GiB)",
        "In place of what the config says, for a model whose weights are not known here.",
        as_type=float,
        placeholder="from the config",
    )


def _number(
    name: str, label: str, help_text: str, *, as_type: type = int, step: float | None = None, placeholder: str = ""
) -> None:
    # No bounds: a browser keeps a number it finds out of bounds to itself, and the page would show another one's figures.
    st.number_input(
        label,
        value=None,  # the session holds it
        step=as_type(step or 1),
        format="%.12g" if as_type is float else None,
        key=PREFIX + name,
        help=help_text,
        placeholder=placeholder or None,
        persist_state="session",
    )


def _choice(name: str, label: str, help_text: str, known: Mapping[str, Parameter]) -> None:
    st.selectbox(label, known[name].options, key=PREFIX + name, help=help_text, persist_state="session")


def _follow_address(known: Mapping[str, Parameter]) -> list[str]:
    """Give the widgets what the address says when something else than them changed it: a link, the back button.

    Returns what it asks for and cannot have.
    """
    session = st.session_state
    address = {name: text for name, text in st.query_params.to_dict().items() if name in known}
    seeded = PREFIX + state.MODEL in session
    # A bare address is how the page is come back to: what was typed here is still there.
    if seeded and (not address or address == session.get(_ADDRESS)):
        return []
    values, problems = state.read_address(address, known)
    if state.CONFIG not in address and session.get(PREFIX + state.CONFIG):
        values[state.CONFIG] = session[PREFIX + state.CONFIG]  # too long for an address, or for another model
    for name, value in values.items():
        session[PREFIX + name] = value
    return problems


def _write_address(values: Mapping[str, Any], known: Mapping[str, Parameter]) -> None:
    wanted = state.write_address(values, known)
    st.session_state[_ADDRESS] = wanted
    now = st.query_params.to_dict()
    for name in known.keys() & now.keys() - wanted.keys():
        del st.query_params[name]
    if wanted.items() - now.items():
        st.query_params.update(wanted)


def card_text(values: Mapping[str, Any]) -> str:
    """The chosen card in words: "H100 80 GB, 79.6 GiB"."""
    card = values[state.CARD]
    num_bytes = cards()[card]
    if num_bytes is None:
        return f"A card of {formatting.number(values[state.CARD_GIB])} GiB"
    return f"{_card_name(card)}, {formatting.memory(num_bytes)}"
