"""Why a request's prompt was not found in the prefix cache: in words, as a bar, and beside the nearest prompt in the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import streamlit as st

from app import formatting
from app.components import notes, palette
from app.components.bars import Share, share_bar
from app.components.kv_cache_map import request_name
from app.components.kv_cache_prefix_source import View
from app.components.kv_cache_prefix_tree import FATE_NAMES
from app.components.kv_cache_source import REQUEST
from backend.analysis.prefix_cache import Fate, Nearest, PromptFate
from backend.analysis.prefix_words import fate_sentences
from backend.tokenizer import Tokenizer

_SELECT = "kv-prefix-select"
_BEFORE, _AFTER = 10, 8  # tokens shown around the first that differs
_MAX_PIECE = 24  # characters of a token


def show(view: View) -> None:
    st.subheader("Why did this request miss?", anchor=False)
    state = st.session_state
    if state.get(REQUEST) is not None and state[REQUEST] not in view.by_name:
        st.warning(notes.plain(f"There is no request {state[REQUEST]} whose prompt is known in this run."))
        state[REQUEST] = None
    _choose(view)
    if state.get(REQUEST) is None:
        st.caption("Choose a request, and the first token at which it left what the cache had is shown.")
        return
    fate = view.cache.fate(view.by_name[state[REQUEST]])
    sentences = fate_sentences(fate, view.cache.block_size, view.name)
    st.markdown("\n".join(f"- {notes.plain(sentence)}" for sentence in sentences))
    if fate.cause == "forked":
        return
    share_bar(
        "Its prompt tokens",
        fate_shares({stretch.fate: fate.num_tokens(stretch.fate) for stretch in fate.stretches}),
        formatting.count(len(fate.token_ids)),
    )
    if fate.nearest is not None and 0 < fate.nearest.num_common < len(fate.token_ids):
        st.html(comparison_html(fate, fate.nearest, state[REQUEST], view.name(fate.nearest.request_id), view.tokenizer))


def fate_shares(sums: Mapping[Fate, int]) -> list[Share]:
    """In their order."""
    return [
        Share(FATE_NAMES[fate][0], number, formatting.count(number), FATE_NAMES[fate][1])
        for fate, number in sums.items()
        if number
    ]


def pieces(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """Each token as text where it stands for some, else its id."""
    texts = [] if tokenizer is None else [tokenizer.decode([it], skip_special_tokens=False) for it in token_ids]
    if not texts:
        return [str(it) for it in token_ids]
    return [
        text.replace("\n", "↵")[:_MAX_PIECE] if text and "\ufffd" not in text else str(token_id)
        for text, token_id in zip(texts, token_ids, strict=True)
    ]


def comparison_html(fate: PromptFate, nearest: Nearest, name: str, other: str, tokenizer: Tokenizer | None) -> str:
    """Both token sequences around the first that differs, one above the other.

    Args:
        name, other: what stands behind "request".
    """
    at = nearest.num_common
    begin = max(0, at - _BEFORE)
    ours = [int(it) for it in fate.token_ids[begin : at + _AFTER]]
    theirs = [int(it) for it in nearest.token_ids[begin : at + _AFTER]]
    first = [None if len(ids) <= at - begin else ids[at - begin] for ids in (ours, theirs)]
    unlike = " and ".join("no token" if it is None else f"id {it}" for it in first)
    rows = "".join(
        f'<div style="opacity:.75;margin-top:.5em">{escape(label)}</div>'
        f'<div style="line-height:2.1;overflow-wrap:anywhere">{_chips(ids, at - begin, begin > 0, tokenizer)}</div>'
        for label, ids in ((f"Request {name}", ours), (f"Request {other}, the nearest in the cache", theirs))
    )
    return (
        '<div class="prefix-comparison" style="font-size:.87rem">'
        f'<div style="font-weight:600">First token that differs: {formatting.count(at)} ({unlike})</div>{rows}'
        f'<div style="opacity:.75;margin-top:.5em">Tokens are counted from 0. Of the nearest prompt and its answer, '
        f"{formatting.count(nearest.num_findable)} tokens were in blocks that could be found.</div></div>"
    )


def _chips(token_ids: Sequence[int], num_common: int, is_cut: bool, tokenizer: Tokenizer | None) -> str:
    """Those in common, the first that differs, and what follows it."""
    parts = ['<span style="opacity:.6">… </span>'] if is_cut else []
    for place, text in enumerate(pieces(token_ids, tokenizer)):
        style = "background:rgba(86,180,233,.28)" if place < num_common else "background:rgba(128,134,145,.16)"
        if place == num_common:
            style = f"background:rgba(230,159,0,.30);outline:2px solid {palette.DECODE};font-weight:600"
        parts.append(
            f'<span style="{style};display:inline-block;line-height:1.5;border-radius:3px;padding:0 .35em;margin-right:3px;'
            f'white-space:pre">{escape(text)}</span>'
        )
    if len(token_ids) <= num_common:
        parts.append('<span style="opacity:.6">ends here</span>')
    return "".join(parts)


def _choose(view: View) -> None:
    state, names = st.session_state, list(view.by_name)
    largest = max(view.measured, key=lambda request_id: _missed(view, request_id), default=None)
    state[_SELECT] = state.get(REQUEST)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.selectbox(
            "Request",
            names,
            index=None,
            format_func=lambda name: _label(view, name),
            key=_SELECT,
            placeholder="choose a request",
            on_change=_take_choice,
        )
        st.button(
            "Largest miss",
            key="kv-prefix-largest",
            icon=":material/search_off:",
            on_click=_set,
            args=(None if largest is None else request_name(largest),),
            disabled=largest is None,
            help="The request with most tokens that had been in the cache or were being computed; without one, most new ones.",
        )


def _missed(view: View, request_id: str) -> tuple[int, int]:
    sums = dict.fromkeys(FATE_NAMES, 0)
    for stretch in view.stretches[request_id]:
        sums[stretch.fate] += stretch.end - stretch.start
    return sums["lost"] + sums["pending"], sums["new"]


def _label(view: View, name: str) -> str:
    stretches = view.stretches[view.by_name[name]]
    cached = sum(stretch.end - stretch.start for stretch in stretches if stretch.fate == "cached")
    return f"{name}, {formatting.count(cached)} of {formatting.count(stretches[-1].end)} tokens from the cache"


def _take_choice() -> None:
    _set(st.session_state[_SELECT])


def _set(name: str | None) -> None:
    st.session_state[REQUEST] = name
