"""How the next answer is to be given: widgets of one conversation, which start from what it was last asked with."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app.components import notes
from app.components.playground_answer import ChatSettings
from app.components.playground_chat import Conversation
from backend.errors import ConfigError
from backend.sampling_params import SamplingParams

_SYSTEM, _TEMPERATURE, _TOP_P, _MAX_TOKENS, _SEED = "system", "temperature", "top_p", "max_tokens", "seed"


def show(chat: Conversation) -> ChatSettings | None:
    """The widgets and what they say; None, with the reason beside them, where nothing can be asked with that."""
    _fill(chat)
    common: dict[str, Any] = {"persist_state": "session", "on_change": _remember, "args": (chat,)}
    with st.expander("System prompt and sampling", icon=":material/tune:", key="playground-settings"):
        st.text_area(
            "System prompt",
            key=key_of(chat, _SYSTEM),
            placeholder="Empty: what the model's chat template says",
            height=80,
            help="Said to the model before the conversation, from the next message on.",
            **common,
        )
        with st.grid(4, min_column_width=130):
            st.number_input(
                "Temperature",
                key=key_of(chat, _TEMPERATURE),
                value=None,
                step=0.1,
                placeholder="0",
                help="0 is greedy: always the likeliest token. Higher is more varied.",
                **common,
            )
            st.number_input(
                "Top-p",
                key=key_of(chat, _TOP_P),
                value=None,
                step=0.05,
                placeholder="1",
                help="Draws from the smallest set of tokens with this probability. 1 leaves none out.",
                **common,
            )
            st.number_input(
                "Max tokens",
                key=key_of(chat, _MAX_TOKENS),
                value=None,
                step=1,
                placeholder=str(ChatSettings().sampling.max_tokens),
                help="The longest answer. The context may end it earlier.",
                **common,
            )
            st.number_input(
                "Seed",
                key=key_of(chat, _SEED),
                value=None,
                step=1,
                placeholder="0",
                help="Same seed, same answer. An answer that is regenerated is drawn with the next one.",
                **common,
            )
        try:
            return read(chat)
        except ConfigError as error:
            problem = str(error)
    st.error(notes.plain(f"{problem}."), icon=":material/error:")  # outside: the expander may be closed
    return None


def read(chat: Conversation) -> ChatSettings:
    """What the widgets say; an empty number is the default. Raises `ConfigError`."""
    values = {name: st.session_state.get(key_of(chat, name)) for name in (_TEMPERATURE, _TOP_P, _MAX_TOKENS, _SEED)}
    default = ChatSettings().sampling.to_dict()
    sampling = SamplingParams.from_dict(default | {name: value for name, value in values.items() if value is not None})
    return ChatSettings(st.session_state.get(key_of(chat, _SYSTEM)) or "", sampling)


def key_of(chat: Conversation, name: str) -> str:
    """The key of a widget: each conversation has its own."""
    return f"playground:{chat.chat_id}:{name}"


def _fill(chat: Conversation) -> None:
    sampling = chat.settings.sampling
    for name, value in {
        _SYSTEM: chat.settings.system_prompt,
        _TEMPERATURE: sampling.temperature,
        _TOP_P: sampling.top_p,
        _MAX_TOKENS: sampling.max_tokens,
        _SEED: sampling.seed,
    }.items():
        st.session_state.setdefault(key_of(chat, name), value)


def _remember(chat: Conversation) -> None:
    """So that a reload finds what was set, and not only what was asked."""
    try:
        chat.settings = read(chat)
    except ConfigError:
        return  # said where the widgets are
