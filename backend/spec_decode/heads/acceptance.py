"""How much a target accepts of a head's chains or trees, found by running both over sequences that are known.

For greedy decoding this needs no drafting: a chain is accepted up to the first token that differs from the sequence's, and until
there its inputs are the sequence's own tokens, which is what `unroll` gives it. So are those of the accepted path of a tree,
which goes on as long as the sequence's token is among the first choices that the tree has there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from backend.spec_decode.draft_tree import DraftTree
from backend.spec_decode.heads.target import DenseTarget, output_rows
from backend.spec_decode.heads.unroll import DraftHead, unroll

_ROWS_AT_ONCE = 4096


class Answered(NamedTuple):
    """A sequence of which parts are a target's greedy answers."""

    token_ids: Sequence[int]
    answers: Sequence[tuple[int, int]]  # first and end position of each


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and its verification.

    Attributes:
        position: of the first token that it gives, in the sequence.
        num_drafted: tokens drafted in a row, those behind the sequence's end left out.
        num_accepted: of them.
        num_tokens: that it gives: the accepted ones and the target's own, unless the sequence ends before.
    """

    position: int
    num_drafted: int
    num_accepted: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """
    Attributes:
        mean_length: tokens per round.
        by_position: of the rounds that drafted a token at a position and accepted all before it, the share that accepted it
            too; None for a position that no round reached.
    """

    num_rounds: int
    mean_length: float
    by_position: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Drafter:
    """A head with all that it takes to draft.

    Attributes:
        feature_layers: behind which layers of the target the head takes hidden states; empty for a Medusa.
        draft_token_ids: int64 [draft_vocab].
        draft_rows: [draft_vocab, hidden], the rows of the target's output head that these have.
    """

    head: DraftHead
    target: DenseTarget
    feature_layers: tuple[int, ...]
    draft_token_ids: Tensor
    draft_rows: Tensor

    @classmethod
    def of(
        cls, head: DraftHead, target: DenseTarget, feature_layers: Sequence[int], draft_token_ids: Tensor
    ) -> Drafter:
        """`draft_token_ids` on the target's device."""
        rows = output_rows(target.model, draft_token_ids)
        return cls(head, target, tuple(feature_layers), draft_token_ids, rows)


@torch.no_grad()
def accepted_lengths(drafter: Drafter, token_ids: Tensor, tree: DraftTree) -> Tensor:
    """How many tokens of each draft the sequence confirms.

    Args:
        token_ids: int64 [num_sequences, length], padded at their end; what padding confirms means nothing.
        tree: of each draft, perhaps a chain.
    Returns:
        int64 [num_sequences, length]: of the draft that starts at each place (see `unroll`), 0 to the tree's depth.
    """
    target, rows = drafter.target, drafter.draft_rows
    states = target.run(token_ids, drafter.feature_layers)
    accepted, node = torch.zeros_like(token_ids), torch.zeros_like(token_ids)
    alive = torch.ones_like(token_ids, dtype=torch.bool)
    places = torch.arange(token_ids.shape[1], device=token_ids.device)
    first_child = torch.tensor([children.start for children in tree.children], device=token_ids.device)
    num_children = torch.tensor([len(children) for children in tree.children], device=token_ids.device)
    for step, hidden in enumerate(unroll(drafter.head, target, states, token_ids, tree.depth)):
        parts = hidden.flatten(0, 1).to(rows.dtype).split(_ROWS_AT_ONCE)
        width = max(len(tree.children[each]) for each in tree.levels[step])
        best = torch.cat([(part @ rows.t()).topk(width).indices for part in parts])
        drafted = drafter.draft_token_ids[best].view(*token_ids.shape, width)
        is_right = drafted == token_ids.roll(-(step + 2), dims=1)[..., None]
        rank = is_right.int().argmax(dim=-1)  # 0 also where none is right
        is_there = places + step + 2 < token_ids.shape[1]
        alive &= is_right.any(dim=-1) & (rank < num_children[node]) & is_there
        node = (first_child[node] + rank).where(alive, 0)
        accepted += alive
    return accepted


def answer_rounds(
    drafter: Drafter, sequences: Sequence[Answered], tree: DraftTree, batch_tokens: int
) -> list[list[Round]]:
    """The rounds that decoding each sequence's answers would have taken, sequences of similar length side by side.

    Args:
        tree: of each draft, perhaps a chain.
        batch_tokens: of sequences that are run at once, padding included.
    """
    rounds: list[list[Round]] = [[] for _ in sequences]
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index].token_ids))
    while order:
        length = len(sequences[order[-1]].token_ids)  # the longest that are left
        number = max(1, batch_tokens // length)
        chosen, order = order[-number:], order[:-number]
        token_ids = torch.zeros(len(chosen), length, dtype=torch.int64)
        for row, index in enumerate(chosen):
            ids = sequences[index].token_ids
            token_ids[row, : len(ids)] = torch.as_tensor(ids)
        accepted = accepted_lengths(drafter, token_ids.to(drafter.target.device), tree).tolist()
        for row, index in enumerate(chosen):
            for first, end in sequences[index].answers:
                rounds[index] += simulate_rounds(accepted[row], first, end, tree.depth)
    return rounds


def simulate_rounds(accepted: Sequence[int], first: int, end: int, num_steps: int) -> Iterator[Round]:
    """The rounds of an answer, whose first token is the prefill's.

    Args:
        accepted: by chain start, of `accepted_lengths`.
        first: position of the answer's first token; `end` is behind its last one.
    """
    position = first + 1
    while position < end:
        num_drafted = min(num_steps, end - position)
        num_accepted = min(int(accepted[position - 2]), num_drafted)
        num_tokens = min(num_accepted + 1, end - position)
        yield Round(position, num_drafted, num_accepted, num_tokens)
        position += num_tokens


def summarize(rounds: Sequence[Round], num_steps: int) -> Acceptance | None:
    """None without a round."""
    if not rounds:
        return None
    shares = []
    for step in range(num_steps):
        reached = sum(each.num_drafted > step and each.num_accepted >= step for each in rounds)
        accepted = sum(each.num_accepted > step for each in rounds)
        shares.append(accepted / reached if reached else None)
    return Acceptance(len(rounds), sum(each.num_tokens for each in rounds) / len(rounds), tuple(shares))
