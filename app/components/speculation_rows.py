"""Rounds as the cells of a picture: what became of each drafted token, and which one the target set behind them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from app import formatting
from app.components import palette
from backend.metrics.speculation_ledger import Round

LAST = "then"  # the column behind the draft


class Kind(NamedTuple):
    colour: str
    meaning: str


# All opaque, with dark text on them: the same picture on light and on dark.
CELLS = {
    "accepted": Kind(palette.ACCEPTED, "Drafted, and the target agreed."),
    "rejected": Kind("#D55E00", "Drafted, and the target did not agree."),
    "not tested": Kind("#F2C3A5", "Drafted behind a rejected token, so nobody looked at it."),
    "recovered": Kind(palette.RECOVERED, "Drawn by the target in place of the rejected token."),
    "bonus": Kind(palette.BONUS, "Drawn by the target on top: it had accepted the whole draft."),
    "behind the end": Kind(palette.FREE, "Accepted or drawn behind the end of the output, and not delivered."),
}


class Cell(NamedTuple):
    """Probabilities as text: a dash where there is none."""

    round: int
    column: str
    kind: str
    text: str
    token_id: int
    draft_prob: str
    target_prob: str
    accept_prob: str
    place: int  # in the output, where it stands or would have stood
    draft_ms: float
    verify_ms: float
    step: int


def cells(rounds: Sequence[Round], first: int, text_of: Callable[[int], str]) -> list[Cell]:
    """
    Args:
        rounds: of one request, one behind the other.
        first: number of the first of them.
        text_of: what is shown for a token id.
    """
    return [cell for number, each in enumerate(rounds, start=first) for cell in _of_round(each, number, text_of)]


def _of_round(each: Round, number: int, text_of: Callable[[int], str]) -> list[Cell]:
    def cell(column: str, kind: str, token_id: int, place: int, probs: Sequence[float]) -> Cell:
        draft_prob, target_prob, accept_prob = (f"{prob:.3g}" for prob in probs) if probs else (formatting.NONE,) * 3
        return Cell(
            round=number,
            column=column,
            kind=kind,
            text=text_of(token_id),
            token_id=token_id,
            draft_prob=draft_prob,
            target_prob=target_prob,
            accept_prob=accept_prob,
            place=each.position + place,
            draft_ms=each.draft_ms,
            verify_ms=each.verify_ms,
            step=each.step,
        )

    probs = zip(each.draft_probs, each.target_probs, each.accept_probs, strict=True)
    drafted = [
        cell(str(index + 1), _kind(each, index), token_id, index, of_token)
        for index, (token_id, of_token) in enumerate(zip(each.draft_token_ids, probs, strict=True))
    ]
    kind = "bonus" if each.num_accepted == len(each.draft_token_ids) else "recovered"
    kind = kind if each.num_emitted > each.num_accepted else "behind the end"
    return [*drafted, cell(LAST, kind, each.token_id, each.num_accepted, ())]


def _kind(each: Round, index: int) -> str:
    if index < each.num_accepted:
        return "accepted" if index < each.num_emitted else "behind the end"
    return "rejected" if index == each.num_accepted else "not tested"
