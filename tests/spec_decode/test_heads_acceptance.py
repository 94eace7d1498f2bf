"""Acceptance found without drafting, against speculative decoding done step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend.spec_decode.draft_tree import DraftTree
from backend.spec_decode.heads.acceptance import Answered, Drafter, Round, answer_rounds, simulate_rounds, summarize
from tests.helpers import dense_greedy
from tests.spec_decode.tiny_heads import (
    FEATURE_LAYERS,
    dense_chain,
    dense_ranking,
    dense_states,
    make_target,
    random_eagle,
    random_ids,
    random_medusa,
)

NUM_STEPS, OUTPUT_LEN = 4, 24
VOCABULARY = torch.tensor([0, 1, 2, 3, 5])  # of 6: what another id would be is never drafted


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_rounds_are_those_of_speculative_decoding(tmp_path: Path, kind: str) -> None:
    target = make_target(tmp_path, vocab_size=6)
    head = random_eagle(target) if kind == "eagle" else random_medusa(target, NUM_STEPS)
    drafter = Drafter.of(head, target, FEATURE_LAYERS if kind == "eagle" else (), VOCABULARY)
    sequences: list[Answered] = []
    all_expected: list[list[Round]] = []
    seen: set[int] = set()
    for seed in range(4):
        prompt = random_ids(6, 5 + seed, seed=seed).tolist()
        output = dense_greedy(tmp_path, prompt, OUTPUT_LEN)
        sequence, position, expected = prompt + output, len(prompt) + 1, []
        states = dense_states(drafter, sequence)
        while position < len(sequence):
            chain = dense_chain(drafter, states, sequence, position, NUM_STEPS)
            follows = sequence[position : position + NUM_STEPS]
            right = 0
            while right < len(follows) and chain[right] == follows[right]:
                right += 1
            emitted = min(right + 1, len(sequence) - position)
            expected.append(Round(position, len(follows), right, emitted))
            position += emitted
        sequences.append(Answered(sequence, [(len(prompt), len(sequence))]))
        all_expected.append(expected)
        seen |= {each.num_accepted for each in expected}
    assert answer_rounds(drafter, sequences, DraftTree.chain(NUM_STEPS), batch_tokens=70) == all_expected
    assert {0, 1} <= seen, "a head that is always wrong would show nothing"


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_rounds_of_trees_are_those_of_speculative_decoding(tmp_path: Path, kind: str) -> None:
    """A round goes on as long as the target's token is one of the first choices that the tree has where the round stands."""
    target = make_target(tmp_path, vocab_size=6)
    head = random_eagle(target) if kind == "eagle" else random_medusa(target, NUM_STEPS)
    drafter = Drafter.of(head, target, FEATURE_LAYERS if kind == "eagle" else (), VOCABULARY)
    tree = DraftTree.from_acceptance_rates(((0.2,) * 4, (0.5,) * 3, (0.5,) * 3, (0.5,) * 2), 60)
    seen: set[int] = set()
    for seed in range(3):
        prompt = random_ids(6, 5 + seed, seed=seed).tolist()
        sequence = prompt + dense_greedy(tmp_path, prompt, OUTPUT_LEN)
        states, position, expected = dense_states(drafter, sequence), len(prompt) + 1, []
        while position < len(sequence):
            node, right, num_left = 0, 0, len(sequence) - position
            while right < num_left and tree.children[node]:
                drafts, most = sequence[position : position + right], len(tree.children[node])
                ranked = dense_ranking(drafter, states, sequence, position, drafts, most)
                if sequence[position + right] not in ranked:
                    break
                node, right = tree.children[node][ranked.index(sequence[position + right])], right + 1
            expected.append(Round(position, min(4, num_left), right, min(right + 1, num_left)))
            position += expected[-1].num_tokens
        assert answer_rounds(drafter, [Answered(sequence, [(len(prompt), len(sequence))])], tree, 70) == [expected]
        seen |= {each.num_accepted for each in expected}
    assert len(seen) >= 3


def test_what_the_end_cuts_off_counts_neither_as_accepted_nor_as_rejected() -> None:
    """Eight tokens after the first: a round of 3, one of 1, one of 4 and one that the end leaves a single token for."""
    accepted = [9] * 20
    for position, number in ((11, 2), (14, 0), (15, 3), (19, 4)):
        accepted[position - 2] = number
    rounds = list(simulate_rounds(accepted, 10, 20, 4))
    assert rounds == [Round(11, 4, 2, 3), Round(14, 4, 0, 1), Round(15, 4, 3, 4), Round(19, 1, 1, 1)]
    summary = summarize(rounds, 4)
    assert summary is not None
    assert (summary.num_rounds, summary.mean_length) == (4, 9 / 4)
    assert summary.by_position == (3 / 4, 1.0, 1 / 2, 0.0)
    assert list(simulate_rounds(accepted, 10, 11, 4)) == []
    assert summarize([], 4) is None
    only = summarize([Round(5, 4, 0, 1)], 4)
    assert only is not None
    assert only.by_position == (0.0, None, None, None)
