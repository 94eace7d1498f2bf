"""One greedy answer against another: equal tokens, or such as plain decoding might have chosen as well.

Two engines that are both right can part where the best logits lie closer than what the order of sums changes. From there on the
texts are different ones, and comparing them says nothing; but every later token of the one that speculates can still be held
against what plain decoding says behind the same text, teacher forced. So all tokens of a prompt are checked. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

NO_TOKEN = -1  # stands for the end of a text, whichever token ends it


@dataclass(frozen=True, slots=True)
class Answer:
    """Attributes:
    origins: of each token: "accepted", "recovered", "bonus" or "plain".
    stopped: a token that ends texts was chosen behind these, which has ended this one.
    """

    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    stopped: bool = False

    @property
    def choices(self) -> tuple[int, ...]:
        """All that was chosen, the end with the rest."""
        return (*self.token_ids, NO_TOKEN) if self.stopped else self.token_ids


class Choice(NamedTuple):
    """What plain decoding says of a token behind a given text.

    Attributes:
        token_id: that it would choose itself, perhaps `NO_TOKEN`.
        gap: by how much the logit of the token in question lies below the best one.
    """

    token_id: int
    gap: float


# A text, and tokens that follow it, of which the last may be `NO_TOKEN` -> what plain decoding says of each of them, behind the
# text and those before it.
Teacher = Callable[[Sequence[int], Sequence[int]], Sequence[Choice]]


@dataclass(frozen=True, slots=True)
class Divergence:
    """A token of speculation that plain decoding has not chosen there.

    Attributes:
        position: in the output.
        plain_token_id: what plain decoding has chosen; `NO_TOKEN`: to end; None: nothing, its answer breaks off, or, in verdicts
            of version 1, not stored. The same holds for `token_id`, of speculation.
        logit_gap: by how much the logit of either lies below the best one at most; None where one of them is None.
        excused: it is below the bound.
    """

    position: int
    plain_token_id: int | None
    token_id: int | None
    logit_gap: float | None
    excused: bool


@dataclass(frozen=True, slots=True)
class Greedy:
    """One prompt decoded greedily by both.

    Attributes:
        num_tokens: that speculation chose, a token that ended the answer among them; of plain decoding in verdicts of version 1.
        num_checked: of these, until one is neither plain decoding's nor excused.
        num_forced: of those, from the first divergence on: they are held against plain decoding behind the same text.
        divergences: in their order; only the last one may be without excuse.
    """

    prompt: int
    num_tokens: int
    num_checked: int
    num_forced: int
    divergences: list[Divergence]

    @property
    def error(self) -> Divergence | None:
        """The one without excuse."""
        return next((each for each in self.divergences if not each.excused), None)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Greedy:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**data, "divergences": [Divergence(**each) for each in data["divergences"]]})

    @classmethod
    def from_version_1(cls, data: Mapping[str, Any]) -> Greedy:
        """There only the first divergence was stored, without its tokens, and nothing behind it was checked."""
        place, excused = data["divergence"], data["excused"]
        if place is None:
            return cls(data["prompt"], data["num_tokens"], data["num_tokens"], 0, [])
        found = Divergence(place, None, None, data["logit_gap"], excused)
        return cls(data["prompt"], data["num_tokens"], place + excused, int(excused), [found])


def token_name(token_id: int | None) -> str:
    """For sentences and tables."""
    return "–" if token_id is None else "the end" if token_id == NO_TOKEN else str(token_id)


def compare_greedy(
    index: int, prompt: tuple[int, ...], plain: Answer, other: Answer, teacher: Teacher, bound: float | None
) -> Greedy:
    """Args:
    index: of the prompt.
    other: of the engine that speculates.
    teacher: asked from the first divergence on.
    bound: below which a gap of logits is an excuse; None: nothing is.
    """
    expected, given = plain.choices, other.choices
    if expected == given:
        return Greedy(index, len(given), len(given), 0, [])
    shorter = min(len(expected), len(given))
    place = next((each for each in range(shorter) if expected[each] != given[each]), shorter)
    if place == shorter:  # one breaks off without an end: there are no two logits to compare
        plain_token_id, token_id = (choices[place] if place < len(choices) else None for choices in (expected, given))
        return Greedy(index, len(given), place, 0, [Divergence(place, plain_token_id, token_id, None, False)])
    text = (*prompt, *given[:place])
    (chosen,) = teacher(text, expected[place : place + 1])
    divergences: list[Divergence] = []
    for position, (choice, token_id) in enumerate(zip(teacher(text, given[place:]), given[place:], strict=True), place):
        # Where they part plain decoding has said itself what it chooses; behind that the teacher says it.
        is_first = position == place
        gap = max(choice.gap, chosen.gap) if is_first else choice.gap
        if gap == 0 and not is_first:
            continue
        excused = bound is not None and gap < bound
        divergences.append(
            Divergence(position, expected[place] if is_first else choice.token_id, token_id, gap, excused)
        )
        if not excused:
            return Greedy(index, len(given), position, position - place, divergences)
    return Greedy(index, len(given), len(given), len(given) - place, divergences)
