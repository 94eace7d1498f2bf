from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from backend.sample.filtering import filtered_weights, probabilities
from backend.sample.rejection_sampler import residual
from backend.sample.speculative_sampling import SpeculativeSampling
from tests.sample.rounds import build, verify

LARGEST_DRAW = 1 - 2.0**-53


def certain(count: int, k: int, draw: float, **row: Any) -> SpeculativeSampling:
    """Every accept draw the same."""
    sampling = build([{"temperature": 1.0, "seed": n} | row for n in range(count)], k)
    return replace(sampling, accept_draws=torch.full((count, k), draw, dtype=torch.float64))


@pytest.mark.parametrize("row", [{"top_k": 2}, {"top_p": 0.7}, {"temperature": 1e-3}, {"temperature": 0.0}])
def test_a_drafted_token_that_the_target_filters_out_is_never_accepted(row: dict[str, Any]) -> None:
    logits = torch.tensor([2.0, 1.9, 0.0, -1.0]).repeat(50, 2, 1)
    q = torch.full((50, 1, 4), 0.25)
    for probs in (q, None):
        output = verify(logits, [[2]] * 50, replace(certain(50, 1, 0.0), **vars_of(row, 50)), probs)
        assert output.num_accepted.sum() == 0
        assert output.accept_probs.sum() == 0
        assert set(output.token_ids[:, 0].tolist()) <= {0, 1}


def vars_of(row: dict[str, Any], count: int) -> dict[str, Tensor]:
    dtypes = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32}
    return {name: torch.full((count,), value, dtype=dtypes[name]) for name, value in row.items()} | {"filters": True}


def test_a_drafted_token_of_draft_probability_zero() -> None:
    """No such draft should come, but where one does the ratio is infinite, or nothing over nothing: no NaN."""
    logits = torch.tensor([1.0, 1.0, -torch.inf]).repeat(2, 2, 1)
    q = torch.zeros(2, 1, 3)
    output = verify(logits, [[1], [2]], certain(2, 1, LARGEST_DRAW), q)
    assert output.num_accepted.tolist() == [1, 0]
    assert output.accept_probs.tolist() == [[1.0], [0.0]]
    assert output.token_ids[1, 0] < 2


@pytest.mark.parametrize("row", [{}, {"temperature": 0.3}, {"top_k": 50, "top_p": 0.9}])
def test_identical_distributions_are_always_accepted(row: dict[str, Any]) -> None:
    """Even at the largest draw there is."""
    torch.manual_seed(8)
    count, vocab_size = 200, 1000
    sampling = certain(count, 1, LARGEST_DRAW, **row)
    logits = torch.randn(count, 2, vocab_size) * 3
    q = probabilities(
        filtered_weights(
            logits[:, 0], sampling.temperature, sampling.top_k, sampling.top_p, filters=bool(sampling.filters)
        )
    )
    drafts = q.multinomial(1)
    output = verify(logits, drafts.tolist(), sampling, q[:, None])
    assert output.num_accepted.tolist() == [1] * count
    assert (output.accept_probs == 1).all()


def test_a_residual_of_nothing_is_the_target() -> None:
    target = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.5, 0.25, 0.25, 0.0]])
    draft = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]])
    assert residual(target, draft).tolist() == [[0.5, 0.25, 0.25, 0.0], [0.25, 0.0, 0.0, 0.0]]
    # A refusal of what should have been accepted: the token is one of the target's, in the target's proportions.
    logits = target[0].log().repeat(4000, 2, 1)
    output = verify(logits, [[0]] * 4000, certain(4000, 1, math.inf), draft[0].repeat(4000, 1, 1))
    counts = torch.bincount(output.token_ids[:, 0], minlength=4)
    assert counts[3] == 0
    assert stats.chisquare(counts[:3].numpy(), [2000, 1000, 1000]).pvalue > 1e-4


def test_one_hot_against_one_hot() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]]).repeat(2, 2, 1)
    q = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])
    output = verify(logits, [[0], [1]], certain(2, 1, LARGEST_DRAW), q)
    assert output.token_ids.tolist() == [[0, 0], [0, -1]]
    assert output.finite.all()


@pytest.mark.parametrize("greedy", [True, False])
def test_padding_is_ignored_whatever_it_holds(greedy: bool) -> None:
    torch.manual_seed(9)
    logits, q = torch.randn(3, 4, 7), torch.randn(3, 3, 7).softmax(-1)
    drafts, counts = torch.randint(7, (3, 3)), [0, 1, 2]
    rows = [{"temperature": 1.0, "seed": row, "top_p": 0.9} for row in range(3)]
    sampling = None if greedy else build(rows, 3)
    expected = verify(logits, drafts.tolist(), sampling, q, counts)
    for row, count in enumerate(counts):
        logits[row, count + 1 :] = math.nan
        q[row, count:] = math.nan
        drafts[row, count:] = (-1, 2**40, 7)[row]
    output = verify(logits, drafts.tolist(), sampling, q, counts)
    for name in ("token_ids", "num_accepted", "target_probs", "draft_probs", "accept_probs", "finite"):
        assert torch.equal(getattr(output, name), getattr(expected, name)), name
    assert output.finite.all()
    for row, count in enumerate(counts):
        assert output.num_accepted[row] <= count
        assert (output.accept_probs[row, count:] == 0).all()


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_named_where_it_matters(bad: float, greedy: bool) -> None:
    """At the first position, at the second after an accepted token, and at one that is never reached."""
    logits = torch.full((4, 3, 5), -20.0)
    logits[:, :, 1] = 20.0
    for row, column in ((0, 0), (1, 1), (2, 2)):
        logits[row, column, 3] = bad
    sampling = None if greedy else build([{"temperature": 1.0, "top_k": 3}] * 4, 2)
    output = verify(logits, [[1, 1], [1, 1], [0, 1], [1, 1]], sampling)
    assert output.finite.tolist() == [False, False, True, True]
    assert output.token_ids[2:].tolist() == [[1, -1, -1], [1, 1, 1]]
    assert ((output.token_ids >= -1) & (output.token_ids < 5)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_are_banned_up_to_min_tokens_and_no_further(temperature: float) -> None:
    """`min_tokens` 5 at output position 3: positions 3 and 4 may not be id 2 or 4, which the target wants everywhere."""
    logits = torch.zeros(3, 4, 6)
    logits[:, :, 2] = 50.0
    logits[:, :, 4] = 40.0
    logits[:, :, 1] = 30.0
    rows = [{"temperature": temperature, "min_tokens": n, "seed": n} for n in (5, 0, 8)]
    sampling = build(rows, 3, [3, 3, 3], [(2, 4), (), (2,)])
    before = logits.clone()
    output = verify(logits, [[1, 1, 2], [1, 1, 2], [4, 4, 4]], sampling)
    assert output.token_ids.tolist() == [[1, 1, 2, 2], [2, -1, -1, -1], [4, 4, 4, 4]]
    assert torch.equal(logits, before), "the target's logits were changed"
    refused = verify(logits, [[2, 2, 2]] * 3, sampling)
    assert refused.token_ids.tolist() == [[1, -1, -1, -1], [2, 2, 2, 2], [4, -1, -1, -1]]
    assert (refused.accept_probs[0] > 0.9).tolist() == [False, False, True]
    assert refused.accept_probs[0, :2].tolist() == [0.0, 0.0]
    logits[:, :, 0] = 90.0
    assert verify(logits, [[0, 0, 0]] * 3, sampling).token_ids.tolist() == [[0, 0, 0, 0]] * 3, "id 0 was banned as well"
