"""What somebody asks for on the Playground, as callbacks: they run before the page is drawn. What is refused is said then."""

from __future__ import annotations

import streamlit as st

from app.components import playground_settings
from app.components.playground_chat import Conversation
from backend.errors import ServeLabError

INPUT = "playground-input"
EDITING = "playground-editing"  # in the session: the conversation and the turn whose message is being changed
PROBLEM = "playground-problem"  # in the session: why what was asked for was not done


def ask_typed(chat: Conversation) -> None:
    ask(chat, st.session_state[INPUT] or "")


def ask(chat: Conversation, question: str, in_place_of: int | None = None) -> None:
    st.session_state.pop(EDITING, None)
    try:
        chat.ask(question, playground_settings.read(chat), in_place_of=in_place_of)
    except ServeLabError as error:
        lost = f" Your message was: {question}" if question.strip() else ""
        st.session_state[PROBLEM] = f"Not sent: {error}.{lost}"


def clear(chat: Conversation) -> None:
    try:
        chat.clear()
    except ServeLabError as error:
        st.session_state[PROBLEM] = f"Not cleared: {error}."


def set_editing(chat: Conversation, index: int) -> None:
    st.session_state[EDITING] = (chat.chat_id, index)
