from __future__ import annotations

import itertools

import pytest
import torch

from backend.sample.filtering import draw_tokens, filtered_weights


@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_filters_keep_what_a_full_sort_keeps(spread: float, rounded: bool) -> None:
    """They may end far among the tokens, or among many equal logits: of those the lowest ids stay."""
    torch.manual_seed(12)
    vocab_size, kinds = 9000, list(itertools.product((-1, 1, 700, 1024, 1025, 8999), (1.0, 0.999, 0.5, 0.01)))
    row = torch.randn(vocab_size) * spread
    row = row.round() if rounded else row
    row[7000:] = -torch.inf
    weights = filtered_weights(
        row.expand(len(kinds), -1),
        torch.ones(len(kinds)),
        torch.tensor([top_k for top_k, _ in kinds], dtype=torch.int32),
        torch.tensor([top_p for _, top_p in kinds]),
        filters=True,
    )
    values, order = row.double().sort(descending=True, stable=True)
    for (top_k, top_p), found in zip(kinds, weights, strict=True):
        expected = (values - values[0]).exp()
        expected[top_k if top_k > 0 else vocab_size :] = 0
        if top_p < 1:
            before = expected.cumsum(0) - expected
            sure = (before - top_p * expected.sum()).abs() > 1e-6 * expected.sum()  # fp32 may not tell the others
            expected[before >= torch.tensor(top_p, dtype=torch.float32).double() * expected.sum()] = 0
        else:
            sure = torch.ones(vocab_size, dtype=torch.bool)
        assert sure.sum() >= vocab_size - 2
        assert torch.allclose(found[order][sure].double(), expected[sure], rtol=1e-5, atol=0), (top_k, top_p)


def test_a_draw_next_to_one_takes_the_last_token_that_weighs_anything() -> None:
    torch.manual_seed(13)
    weights = torch.rand(200, 30)
    weights[:, ::7] = 0
    weights[:, 25:] = 0
    draws = torch.full((200,), 1 - 2.0**-53, dtype=torch.float64)
    assert draw_tokens(weights, draws).tolist() == [24] * 200
    assert draw_tokens(weights, torch.zeros(200, dtype=torch.float64)).tolist() == [1] * 200
