"""A conversation on its page: what was said, the answer as it comes, and what can be done about both."""

from __future__ import annotations

import streamlit as st

from app import formatting
from app.components import (
    notes,
    playground_actions,
    playground_engine,
    playground_export,
    playground_settings,
    playground_text,
    playground_turns,
)
from app.components.playground_answer import AnswerView, ChatSettings
from app.components.playground_chat import Conversation
from app.components.playground_store import Playground, playground_of
from app.services import Services

ADDRESS = "chat"  # of the query
TICK_S = 0.25  # while an answer comes
LOOK_S = 2.0  # for what another tab or a run has changed

_CHAT, _SHOW_TOKENS = "playground-chat", "playground-tokens"
_EXPLANATION = r"""
Each message is sent with all that was said before it, as the model's chat template writes it down; the prefix cache keeps the
KV of what it has seen, so that mostly the new message is computed. The engine then draws one token after another from

$$p_i \propto \exp(z_i / T),$$

where $z$ are the model's logits and $T$ the temperature, cut to the smallest set of tokens that has the probability top-p
(Holtzman et al., *The Curious Case of Neural Text Degeneration*, 2020); every draw follows from the seed and the token's place.
**TTFT** runs from the moment the engine is free to the first token, **tok/s** counts the tokens after it. With speculation
(Leviathan et al., *Fast Inference from Transformers via Speculative Decoding*, 2023) a draft is proposed and checked at once:
the colour of a token says whether it was *accepted*, *recovered* in place of a rejected one, or a *bonus*.
"""


def pick(services: Services) -> Conversation:
    """The conversation that the address names, or else this viewer's last one, or else a new one; the address then says which."""
    playground = playground_of(services)
    asked = st.query_params.get(ADDRESS)
    chat = playground.find(asked or st.session_state.get(_CHAT))
    if chat is None:
        chat = playground.begin()
        if asked:
            st.warning(
                "This conversation is not here any more: they last as long as the server runs. This is a new one.",
                icon=":material/forum:",
            )
    st.session_state[_CHAT] = st.query_params[ADDRESS] = chat.chat_id
    return chat


def show(services: Services, chat: Conversation) -> None:
    playground = playground_of(services)
    seen = _look(playground, chat)  # before anything is drawn: what changes meanwhile is drawn by the next look
    st.html(playground_text.STYLE)
    can_ask = playground_engine.show(playground)
    settings = playground_settings.show(chat)
    show_tokens = _controls(chat)
    playground_turns.show(chat, can_ask=can_ask and settings is not None, show_tokens=show_tokens)
    _live(playground, chat, seen, show_tokens)
    if problem := st.session_state.pop(playground_actions.PROBLEM, None):
        st.error(notes.plain(problem), icon=":material/error:")
    with st.expander("What am I looking at?"):
        st.markdown(_EXPLANATION)
    busy = chat.under_way is not None
    st.chat_input(
        _invitation(playground, chat, can_ask, settings),
        key=playground_actions.INPUT,
        disabled=busy or not can_ask or settings is None,
        on_submit=playground_actions.ask_typed,
        args=(chat,),
    )


def _invitation(playground: Playground, chat: Conversation, can_ask: bool, settings: ChatSettings | None) -> str:
    if chat.under_way is not None:
        return "Stop the answer, or wait for its end"
    if not can_ask:
        return "Wait for the model" if playground.is_loading else "Load a model first"
    return "Ask something" if settings is not None else "Correct the settings first"


def _controls(chat: Conversation) -> bool:
    """What can be done with the whole conversation. Whether tokens are to be told apart."""
    with st.container(horizontal=True, vertical_alignment="center"):
        show_tokens = st.toggle(
            "Show tokens",
            key=_SHOW_TOKENS,
            persist_state="session",
            help="Tells tokens apart, special ones included. Point at one for its id.",
        )
        nothing = not chat.turns
        with st.popover(
            "Export", icon=":material/ios_share:", disabled=nothing, on_change="rerun", key="export"
        ) as box:
            if box.open:
                _export(chat)
        if nothing and chat.can_undo:
            st.button("Undo clear", icon=":material/undo:", key="playground-undo", on_click=chat.undo)
        else:
            st.button(
                "Clear",
                icon=":material/delete_sweep:",
                key="playground-clear",
                disabled=nothing or chat.under_way is not None,
                help="Begins anew, with the same settings. It can be undone until the next message.",
                on_click=playground_actions.clear,
                args=(chat,),
            )
    return show_tokens


def _export(chat: Conversation) -> None:
    text = playground_export.text(chat.chat_id, chat.turns)
    st.download_button(
        "Download JSON",
        text,
        file_name=f"conversation-{chat.chat_id}.json",
        mime="application/json",
        icon=":material/download:",
        on_click="ignore",
    )
    st.code(text, language="json", height=260, width=520)  # it has a button that copies


def _live(playground: Playground, chat: Conversation, seen: tuple[object, ...], show_tokens: bool) -> None:
    """What changes by itself: an answer under way, a load, a run. The page is drawn anew when one of them begins or ends."""
    services = playground.services
    busy = chat.under_way is not None or playground.is_loading

    def draw() -> None:
        if _look(playground, chat) != seen:
            st.rerun()
        playground_engine.show_loading(playground)
        turn = chat.under_way
        waiting = playground_engine.waiting_for(services, playground)
        if turn is not None:
            with st.chat_message("assistant", avatar=playground_turns.MODEL):
                _under_way(services, chat, turn.answer.view(), waiting, show_tokens)
        elif waiting is not None and not playground.is_loading:
            st.info(
                f"The engine is busy with {notes.plain(waiting)}. What you ask now is answered after it.",
                icon=":material/hourglass_top:",
            )

    st.fragment(draw, run_every=TICK_S if busy else LOOK_S)()


def _look(playground: Playground, chat: Conversation) -> tuple[object, ...]:
    """Another value after every change that the whole page has to show."""
    host, under_way = playground.services.host, chat.under_way
    return chat.version, under_way and under_way.answer, host.state, id(host.info), playground.is_loading


def _under_way(
    services: Services, chat: Conversation, answer: AnswerView, waiting: str | None, show_tokens: bool
) -> None:
    if answer.status == "waiting":
        st.caption(notes.plain(f"Waiting for {waiting or 'the engine'}"))
    elif not answer.tokens:
        st.caption(f"Reading {formatting.quantity(answer.num_prompt_tokens, 'tokens')} of prompt")
    playground_turns.show_answer(answer, show_tokens)
    queued = services.queue.queued() if answer.status == "answering" else ()
    if queued:
        st.caption(f"Run #{queued[0]} waits for the end of this answer.")
    st.button("Stop", icon=":material/stop_circle:", key="playground-stop", on_click=chat.stop)
