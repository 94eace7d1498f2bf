"""Prompt lookup, against a scan of the whole text."""

from __future__ import annotations

import random

import pytest

from backend.sampling_params import SamplingParams
from backend.spec_decode.ngram import NgramProposer, NgramText
from backend.spec_decode.proposer import DraftRequest


def scanned(tokens: list[int], n_min: int, n_max: int, num_tokens: int) -> list[int]:
    """The longest end first, its last occurrence before the end itself; what follows may run into what it makes up."""
    for n in range(min(n_max, len(tokens) - 1), n_min - 1, -1):
        for begin in range(len(tokens) - n - 1, -1, -1):
            if tokens[begin : begin + n] == tokens[-n:]:
                grown = list(tokens)
                for _ in range(num_tokens):
                    grown.append(grown[begin + n + len(grown) - len(tokens)])
                return grown[len(tokens) :]
    return []


@pytest.mark.parametrize(("n_min", "n_max"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_a_draft_is_what_a_scan_of_the_text_finds(n_min: int, n_max: int) -> None:
    rng, found = random.Random(n_max), 0
    for vocabulary in (2, 5, 40):
        text = [rng.randrange(vocabulary) for _ in range(60)]
        index = NgramText(text[:7], n_min, n_max)
        for end in range(7, len(text)):
            for num_tokens in (1, 5):
                draft = index.continuation(num_tokens)
                assert draft == scanned(text[:end], n_min, n_max, num_tokens)
                found += bool(draft)
            index.extend(text[end : end + 1])
    assert found > 50


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3]])
def test_nothing_is_drafted_where_nothing_has_occurred_before(text: list[int]) -> None:
    assert NgramText(text, 1, 3).continuation(5) == []


def test_each_request_is_drafted_for_from_its_own_text() -> None:
    proposer = NgramProposer(1, 3)
    proposer.begin("a", [1, 2, 3, 1, 2], 0)
    proposer.begin("b", [7, 8, 9], 0)
    proposer.begin("gone", [1, 1], 0)
    proposer.forget("gone")
    proposer.extend("b", [7, 8])
    requests = [DraftRequest(key, count, SamplingParams(), 0, 0, 1) for key, count in (("b", 2), ("a", 4))]
    output = proposer.propose(requests)
    assert output.num_tokens == [2, 4]
    assert output.token_ids[0, :2].tolist() == [9, 7]
    assert output.token_ids[1].tolist() == [3, 1, 2, 3]
    assert output.probs is None
    proposer.begin("c", [5, 6], 0)
    assert proposer.propose([DraftRequest("c", 3, SamplingParams(), 0, 0, 1)]).num_tokens == [0]
