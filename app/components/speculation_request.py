"""The rounds of one request as a picture, a window of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import streamlit as st

from app import formatting
from app.components import notes, speculation_charts
from app.components.bars import Share, share_bar
from app.components.kv_cache_text import visible
from app.components.speculation_pick import REQUEST, ROUND
from app.components.speculation_rows import CELLS, cells
from app.components.speculation_source import Source, tokenizer_of
from app.services import Services
from backend.analysis.draft_rounds import RoundColumns

MAX_ROUNDS = 40  # of one picture

_SELECT, _SLIDER = "speculation-request-select", "speculation-round-slider"


def show(services: Services, source: Source, *, choose: bool) -> None:
    """
    Args:
        choose: offer the choice of a request and of its rounds; else the newest rounds of the newest request are drawn.
    """
    request_id = _request(source) if choose else source.measured_ids[-1]
    if request_id is None:
        return
    rounds = source.history.of([request_id])
    num_rounds = len(rounds.step)
    last_begin = max(1, num_rounds - MAX_ROUNDS + 1)
    first = _first_round(num_rounds, last_begin) if choose else last_begin
    drawn = source.history.rounds(request_id, first - 1, first - 1 + MAX_ROUNDS)
    _what_became_of_them(rounds)
    text_of = _texts(services, source, request_id)
    name = next(name for name, it in source.by_name.items() if it == request_id)
    last = first + len(drawn) - 1
    which = "" if num_rounds <= MAX_ROUNDS else f", {first:,} to {last:,} of {num_rounds:,}"
    picture = speculation_charts.rounds(
        cells(drawn, first, text_of), f"Rounds of request {name}{which}", max(len(it.draft_token_ids) for it in drawn)
    )
    with st.container(key="speculation-rounds"):
        st.vega_lite_chart(*picture, key=f"speculation-rounds-{source.run.run_id}-{name}")


def _request(source: Source) -> str | None:
    state, names = st.session_state, list(source.by_name)
    if state.get(REQUEST) is not None and state[REQUEST] not in source.by_name:
        st.warning(notes.plain(f"No round of this run is of a request {state[REQUEST]}."))
        state[REQUEST] = state[ROUND] = None
    state[_SELECT] = state.get(REQUEST) or names[0]
    st.selectbox(
        "Request",
        names,
        format_func=lambda name: _label(source, name),
        key=_SELECT,
        on_change=_take_request,
    )
    return source.by_name[state[_SELECT]]


def _label(source: Source, name: str) -> str:
    num_rounds, length = source.history.totals_of(source.by_name[name])
    in_words = formatting.metric("mean_acceptance_length", length)
    return f"{name}, {formatting.count(num_rounds)} rounds, acceptance length {in_words}"


def _first_round(num_rounds: int, last_begin: int) -> int:
    """Number of the first round to draw, and what changes it."""
    state = st.session_state
    first = min(max(1, state.get(ROUND) or 1), last_begin)
    state[ROUND] = first if first > 1 else None
    if last_begin == 1:
        return first
    state[_SLIDER] = first
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.button(
            "Earlier",
            icon=":material/chevron_left:",
            key="speculation-earlier",
            on_click=_go_to,
            args=(max(1, first - MAX_ROUNDS),),
            disabled=first == 1,
        )
        st.slider("First round", 1, last_begin, key=_SLIDER, on_change=_take_slider)
        st.button(
            "Later",
            icon=":material/chevron_right:",
            key="speculation-later",
            on_click=_go_to,
            args=(min(last_begin, first + MAX_ROUNDS),),
            disabled=first == last_begin,
        )
    st.caption(f"{MAX_ROUNDS} of {formatting.count(num_rounds)} rounds are drawn at once.")
    return first


def _what_became_of_them(rounds: RoundColumns) -> None:
    """The legend of the picture, with what each colour adds up to over all rounds of the request."""
    is_whole = rounds.num_accepted == rounds.num_drafted
    rejected = int((~is_whole).sum())
    in_vain = int((rounds.num_accepted + 1 - rounds.num_emitted).clip(min=0).sum())
    is_last_delivered = rounds.num_emitted > rounds.num_accepted
    amounts = {
        "accepted": int(rounds.num_delivered.sum()),
        "rejected": rejected,
        "not tested": int((rounds.num_drafted - rounds.num_accepted).sum()) - rejected,
        "recovered": int((~is_whole & is_last_delivered).sum()),
        "bonus": int((is_whole & is_last_delivered).sum()),
        "behind the end": in_vain,
    }
    shares = [
        Share(kind, number, formatting.count(number), CELLS[kind].colour) for kind, number in amounts.items() if number
    ]
    total = formatting.quantity(int(rounds.num_emitted.sum()), "tokens delivered")
    share_bar("Its drafted tokens, and those that the target drew", shares, f"{total}, {len(rounds.step):,} rounds")


def _texts(services: Services, source: Source, request_id: str) -> Callable[[int], str]:
    """A token as text on one line, or its id where there is no text."""
    tokenizer = tokenizer_of(services, source, request_id)
    if tokenizer is None:
        return str

    @cache
    def text_of(token_id: int) -> str:
        return visible(tokenizer.decode([token_id], skip_special_tokens=False)) or str(token_id)

    return text_of


def _take_request() -> None:
    st.session_state[REQUEST], st.session_state[ROUND] = st.session_state[_SELECT], None


def _take_slider() -> None:
    _go_to(st.session_state[_SLIDER])


def _go_to(first: int) -> None:
    st.session_state[ROUND] = first
