"""What proposers do for tokens behind which nobody drafts, as most of a large batch: they take note of them, and no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from backend.spec_decode.lookahead import LookaheadProposer, WindowLayout
from backend.spec_decode.ngram import NgramProposer
from backend.spec_decode.proposer import Proposer
from tests.metrics.test_live import instructions


@pytest.mark.parametrize(
    "make",
    [lambda: NgramProposer(1, 4), lambda: LookaheadProposer(WindowLayout(8, 5), torch.device("cpu"))],
    ids=["ngram", "lookahead"],
)
def test_a_token_costs_some_tens_of_instructions_in_a_text_of_any_length(make: Callable[[], Proposer]) -> None:
    proposer, costs = make(), []
    for num_tokens in (10, 10_000):
        proposer.begin(str(num_tokens), list(range(num_tokens)), 0)
        costs.append(min(instructions(lambda key=num_tokens: proposer.extend(str(key), [7])) for _ in range(5)))
    assert costs[0] == costs[1] < 120
