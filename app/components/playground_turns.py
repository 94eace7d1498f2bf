"""The turns of a conversation as they are read, and the last one as it can be asked again."""

from __future__ import annotations

import streamlit as st

from app import formatting
from app.components import notes, playground_actions, playground_text
from app.components.playground_answer import AnswerView
from app.components.playground_chat import Conversation, Turn

USER, MODEL = ":material/person:", ":material/smart_toy:"
_EXAMPLES = ("Why is the sky blue?", "Write a haiku about memory.", "Name three prime numbers above 90.")


def show(chat: Conversation, *, can_ask: bool, show_tokens: bool) -> None:
    """All that has ended, and the question whose answer has not."""
    turns = chat.turns
    for index, turn in enumerate(turns):
        if index == len(turns) - 1 and st.session_state.get(playground_actions.EDITING) == (chat.chat_id, index):
            _edit(chat, index, turn)
            continue
        with st.chat_message("user", avatar=USER):
            st.html(playground_text.text_html(turn.question))
        answer = turn.answer.view()
        if not answer.is_over:
            continue  # it is drawn where it is watched
        with st.chat_message("assistant", avatar=MODEL):
            show_answer(answer, show_tokens)
            if index == len(turns) - 1:
                _again(chat, index, turn, disabled=not can_ask)
    if not turns and can_ask:
        with st.container(horizontal=True):
            for number, question in enumerate(_EXAMPLES):
                st.button(
                    question,
                    icon=":material/chat_bubble:",
                    key=f"playground-example-{number}",
                    on_click=playground_actions.ask,
                    args=(chat, question),
                )


def show_answer(answer: AnswerView, show_tokens: bool) -> None:
    """What has come of it, how fast, and how it ended."""
    if answer.tokens:
        st.html(playground_text.answer_html(answer.tokens, show_tokens=show_tokens, goes_on=not answer.is_over))
        if playground_text.has_origins(answer.tokens):
            st.html(playground_text.legend_html(answer.tokens))
        if answer.is_over and not show_tokens and not answer.text:
            st.caption(
                "These tokens stand for no text: the model has random weights, or it ended at once. Show tokens tells their ids."
            )
    figures = _figures(answer)
    if figures:
        st.caption(notes.plain(" · ".join(figures)))
    if answer.status == "failed":
        kept = "" if answer.text else " This message is not part of what the model sees next."
        st.error(notes.plain(f"{answer.error}.{kept}"), icon=":material/error:")
    elif answer.status == "stopped" and not answer.tokens:
        st.caption("Stopped before the first token.")
    elif answer.context_is_full:
        st.warning(
            f"The context of {formatting.quantity(answer.max_model_len, 'tokens')} is full. Clear the conversation to go on.",
            icon=":material/expand:",
        )


def _figures(answer: AnswerView) -> list[str]:
    """One answer in numbers."""
    if not answer.tokens:
        return []
    sampling, n = answer.settings.sampling, len(answer.tokens)
    figures = [
        f"{formatting.number(answer.tokens_per_s)} tok/s",
        f"TTFT {formatting.metric('ttft_ms', answer.ttft_ms)}",
        formatting.quantity(n, "token" if n == 1 else "tokens"),
    ]
    if not answer.is_over:
        return figures
    if answer.status == "stopped":
        figures[-1] += ", stopped"
    elif answer.finish_reason == "length" and not answer.context_is_full:
        figures[-1] += ", cut at max tokens"
    figures.append(f"context {formatting.count(answer.num_context_tokens)} of {formatting.count(answer.max_model_len)}")
    drawn = f"temperature {formatting.number(sampling.temperature)}, seed {sampling.seed}"
    return [*figures, answer.model or "", drawn if sampling.temperature else "greedy"]


def _again(chat: Conversation, index: int, turn: Turn, *, disabled: bool) -> None:
    """The last question once more, in the same words or in others."""
    greedy = turn.answer.settings.sampling.temperature == 0
    with st.container(horizontal=True):
        st.button(
            "Regenerate",
            icon=":material/refresh:",
            type="tertiary",
            key="playground-regenerate",
            disabled=disabled,
            help="At temperature 0 the same model gives the same answer."
            if greedy
            else "The same message, with the settings as they are now and the next seed.",
            on_click=playground_actions.ask,
            args=(chat, turn.question, index),
        )
        st.button(
            "Edit",
            icon=":material/edit:",
            type="tertiary",
            key="playground-edit",
            help="Change the last message and ask again; its answer is replaced.",
            on_click=playground_actions.set_editing,
            args=(chat, index),
        )


def _edit(chat: Conversation, index: int, turn: Turn) -> None:
    with st.chat_message("user", avatar=USER), st.form("playground-edit-form", border=False):
        text = st.text_area("Message", turn.question, key=f"playground-edited:{chat.chat_id}:{index}:{turn.attempt}")
        with st.container(horizontal=True):
            send = st.form_submit_button("Send", type="primary", icon=":material/send:")
            cancel = st.form_submit_button("Keep as it was")
    if send or cancel:
        st.session_state.pop(playground_actions.EDITING, None)
        if send:
            playground_actions.ask(chat, text or "", index)
        st.rerun()
