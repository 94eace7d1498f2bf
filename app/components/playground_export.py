"""A conversation as a document. No Streamlit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from app.components.playground_answer import AnswerView
from app.components.playground_chat import Turn
from app.components.playground_text import has_origins

FORMAT = "servelab-conversation"
VERSION = 1


def document(chat_id: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """JSON-safe data: what was said, with which settings, as which tokens, how fast. What does not exist is null.

    Where an engine accepted drafts at a set rate, the document and each such turn have a `synthetic` that is true.
    """
    answered = [(turn, turn.answer.view()) for turn in turns]
    return {
        "format": FORMAT,
        "version": VERSION,
        "id": chat_id,
        **_mark(any(answer.is_synthetic for _, answer in answered)),
        "turns": [_turn(turn, answer) for turn, answer in answered],
    }


def text(chat_id: str, turns: Sequence[Turn]) -> str:
    """`document` to be saved or copied; letters of all scripts are written as they are."""
    dumped = json.dumps(document(chat_id, turns), indent=2, ensure_ascii=False, allow_nan=False)
    return dumped.encode("utf-8", "backslashreplace").decode()  # half characters have no UTF-8 form


def _mark(is_synthetic: bool) -> dict[str, bool]:
    return {"synthetic": True} if is_synthetic else {}


def _turn(turn: Turn, answer: AnswerView) -> dict[str, Any]:
    origins = [token.origin for token in answer.tokens] if has_origins(answer.tokens) else None
    return {
        "question": turn.question,
        "system_prompt": answer.settings.system_prompt.strip() or None,
        "sampling": answer.settings.sampling.to_dict(),
        "model": answer.model,
        **_mark(answer.is_synthetic),
        "answer": {
            "text": answer.text,
            "token_ids": [token.token_id for token in answer.tokens],
            "origins": origins,
            "status": answer.status,
            "finish_reason": answer.finish_reason,
            "error": answer.error,
            "input_tokens": answer.num_prompt_tokens,
            "output_tokens": len(answer.tokens),
            "ttft_ms": answer.ttft_ms,
            "tpot_ms": answer.tpot_ms,
        },
    }
