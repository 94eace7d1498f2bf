"""What the tokens in the pool's blocks say, for who points at one on the map and has asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import streamlit as st

from app import formatting
from app.components import kv_cache_prompts, notes
from app.components.kv_cache_prompts import Prompts
from app.services import Services
from backend.core.block_pool import NULL_BLOCK
from backend.errors import ServeLabError
from backend.metrics.kv_use import KVUse
from backend.metrics.pool_history import PoolMoment
from backend.tokenizer import Tokenizer
from db.run_rows import Run

MAX_CHARACTERS = 200  # of a block's text
MAX_BLOCKS = 20_000  # whose text is sent with a step; they are about 2 MB
_SHOWN, _SOURCE = "kv-show-text", "kv-text-source"
_MAX_KEPT = 200_000  # texts
_TOO_MANY = "The text of {} blocks is sent with a step, those of the requests that began first."
_VISIBLE = {" ": "·", "\n": "↵", "\t": "⇥"}


class BlockTexts(NamedTuple):
    """Lines by block, as they are to be read; `note` says why blocks have none."""

    lines: dict[int, str]
    note: str | None


@dataclass
class _Source:
    """Of one run, from step to step."""

    run_id: int
    prompts: Prompts | None
    problem: str | None
    lines: dict[tuple[str, int, int, int], str] = field(
        default_factory=dict
    )  # by request, first token, end, tokens known


def asked(services: Services, run: Run, moment: PoolMoment, use: KVUse) -> BlockTexts | None:
    """The switch, and while it is on what the blocks hold that somebody has. Off, no text leaves the server."""
    if not st.checkbox(
        "Show text",
        key=_SHOWN,
        help="Pointing at a block also shows the text of its tokens: of prompts and, once their requests have ended, of answers.",
    ):
        return None
    texts = _texts(services, run, moment, use)
    if texts.note:
        st.caption(notes.plain(texts.note))
    return texts


def visible(text: str) -> str:
    """On one line, with white space and what cannot be seen made visible, and not too long."""
    short = text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
    return "".join(_VISIBLE.get(it) or (it if it.isprintable() else f"\\u{ord(it):04x}") for it in short)


def _texts(services: Services, run: Run, moment: PoolMoment, use: KVUse) -> BlockTexts:
    source: _Source | None = st.session_state.get(_SOURCE)
    if source is None or source.run_id != run.run_id:
        source = st.session_state[_SOURCE] = _open(run)
    if source.prompts is None:
        return BlockTexts({}, source.problem)
    source.prompts.grow(services)
    if len(source.lines) > _MAX_KEPT:
        source.lines.clear()
    lines: dict[int, str] = {}
    try:
        for request_id, groups in moment.blocks.held.items():
            num_tokens = use.requests[request_id].num_tokens
            for blocks in groups:
                for index, block_id in enumerate(blocks):
                    begin = index * use.block_size
                    end = begin + use.block_size if num_tokens is None else min(num_tokens, begin + use.block_size)
                    if block_id == NULL_BLOCK or block_id in lines or end <= begin:
                        continue
                    if len(lines) == MAX_BLOCKS:
                        return BlockTexts(lines, _TOO_MANY.format(formatting.count(MAX_BLOCKS)))
                    lines[block_id] = _line(source, source.prompts, run, request_id, begin, end)
    except ServeLabError as error:
        return BlockTexts(lines, f"The text of blocks cannot be told: {error}.")
    return BlockTexts(lines, None)


def _open(run: Run) -> _Source:
    try:
        prompts = kv_cache_prompts.open_prompts(run)
    except ServeLabError as error:
        return _Source(run.run_id, None, f"The text of blocks cannot be told: {error}.")
    if prompts.tokenizer is None:
        return _Source(
            run.run_id, None, f"The tokenizer of {run.model} is not here any more, so tokens cannot be told as text."
        )
    return _Source(run.run_id, prompts, None)


def _line(source: _Source, prompts: Prompts, run: Run, request_id: str, begin: int, end: int) -> str:
    tokens = prompts.known.tokens_of(request_id)
    if tokens is None:
        return "Its prompt is not known."
    token_ids = tokens.token_ids[begin:end]
    key = request_id, begin, end, len(token_ids)
    if key not in source.lines:
        assert prompts.tokenizer is not None
        missing = "" if len(token_ids) == end - begin else "Output text not stored" + ("." if run.is_final else " yet.")
        source.lines[key] = " ".join(filter(None, (_text(prompts.tokenizer, token_ids.tolist()), missing)))
    return source.lines[key]


def _text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    if not token_ids:
        return ""
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    if text:
        return f"“{visible(text)}”"
    ids = ", ".join(map(str, token_ids))
    return f"Token ids, which stand for no text: {visible(ids).replace('·', ' ')}"
