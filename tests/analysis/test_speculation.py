from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.analysis.speculation import (
    RoundCost,
    acceptance_probability,
    accepted_distribution,
    best_prediction,
    constant_rate_length,
    mean_acceptance_length,
    predict,
    predict_batches,
    predict_each,
    rate_of_length,
)

RATES = st.lists(st.floats(0, 1), max_size=6)


def by_enumeration(rates: Sequence[float]) -> list[float]:
    """Share of rounds by accepted tokens: every outcome of k independent tests, the first failing one ends the round."""
    shares = [0.0] * (len(rates) + 1)
    for outcome in itertools.product((True, False), repeat=len(rates)):
        probability = math.prod(rate if passed else 1 - rate for rate, passed in zip(rates, outcome, strict=True))
        shares[(*outcome, False).index(False)] += probability
    return shares


@pytest.mark.parametrize(
    ("rate", "k", "tokens"),
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_the_published_table(rate: float, k: int, tokens: float) -> None:
    """Table 1 of Leviathan et al.: speed over the baseline where drafting costs nothing and verifying one step."""
    assert round(constant_rate_length(rate, k), 2) == tokens
    assert round(predict([rate] * k, RoundCost()).speedup, 2) == tokens


@given(rates=RATES)
def test_lengths_against_every_outcome(rates: list[float]) -> None:
    shares = by_enumeration(rates)
    assert accepted_distribution(rates) == pytest.approx(shares, abs=1e-12)
    assert mean_acceptance_length(rates) == pytest.approx(1 + sum(n * share for n, share in enumerate(shares)))


@given(rate=st.floats(0, 1), k=st.integers(0, 12))
def test_one_rate_everywhere(rate: float, k: int) -> None:
    length = constant_rate_length(rate, k)
    assert length == pytest.approx(mean_acceptance_length([rate] * k), rel=1e-9)
    if k:
        assert constant_rate_length(rate_of_length(min(length, k + 1), k), k) == pytest.approx(length, rel=1e-9)


def test_how_often_a_draw_from_one_distribution_passes_for_another() -> None:
    """By hand: 0.5 x 1 + 0.3 x 1/3 + 0.2 x 1 for the draft's tokens."""
    assert acceptance_probability([0.7, 0.1, 0.2], [0.5, 0.3, 0.2]) == pytest.approx(0.8)
    with pytest.raises(ValueError):
        acceptance_probability([1.0], [0.5, 0.5])


def test_speed_by_hand() -> None:
    """Rates 0.8, 0.5: 1 + 0.8 + 0.4 tokens for 2 x 0.1 + 0.05 of drafting and 1.25 of verifying."""
    prediction = predict([0.8, 0.5], RoundCost(lambda positions: 0.95 + 0.1 * positions, 0.1, 0.05))
    assert prediction.mean_acceptance_length == pytest.approx(2.2)
    assert (prediction.draft_cost, prediction.verify_cost) == pytest.approx((0.25, 1.25))
    assert prediction.speedup == pytest.approx(2.2 / 1.5)
    assert prediction.arithmetic == "2.200 tokens / (0.250 draft + 1.250 verify) plain steps = ×1.47"


def test_plain_decoding_is_the_round_without_a_draft() -> None:
    prediction = predict([], RoundCost(lambda positions: 99.0, 1.0, 1.0))
    assert (prediction.num_speculative_tokens, prediction.speedup) == (0, 1.0)


@pytest.mark.parametrize(("rate", "c", "best"), [(0.5, 0.6, 0), (0.8, 0.05, 8), (0.6, 0.01, 7), (0.9, 0.2, 7)])
def test_the_best_number_of_tokens_is_the_best_of_all(rate: float, c: float, best: int) -> None:
    """By the paper's formula, written out. Where the rate is below c no number gains (its Corollary 3.9)."""
    speeds = [(1 - rate ** (k + 1)) / ((1 - rate) * (k * c + 1)) for k in range(21)]
    assert max(range(21), key=speeds.__getitem__) == best
    cost = RoundCost(draft_token=c)
    found = best_prediction([rate] * 20, cost)
    assert found.num_speculative_tokens == best
    assert found.speedup == pytest.approx(speeds[best])
    assert [each.speedup for each in predict_each([rate] * 20, cost)] == pytest.approx(speeds)


def roofline(ms_weights: float, ms_token: float) -> Callable[[int], float]:
    return lambda num_tokens: max(ms_weights, ms_token * num_tokens)


def test_batches_gain_until_their_tokens_cost_more_than_the_weights() -> None:
    """Weights take 1 ms to read and a token 10 µs to compute, so that 100 tokens are free; k = 4, every token accepted.

    One request: 5 tokens for the step of one. 20 requests: 100 tokens, the last that are free. 50: 250 tokens, 2.5 steps for
    5 tokens. 100 and more: five times the tokens for five times the time.
    """
    found = predict_batches([1, 20, 50, 100, 200], [1.0] * 4, roofline(1.0, 0.01))
    assert [each.fixed.speedup for each in found] == pytest.approx([5, 5, 2, 1, 1])
    assert [each.best.num_speculative_tokens for each in found] == [4, 4, 1, 0, 0]
    assert found[2].best.speedup == pytest.approx(2.0)
    with_draft = predict_batches([1, 200], [0.5] * 4, roofline(1.0, 0.01), roofline(0.1, 0.0005))
    assert with_draft[0].fixed.speedup == pytest.approx(1.9375 / 1.4)
    assert with_draft[1].fixed.speedup == pytest.approx(1.9375 * 2 / (4 * 0.1 + 10))
    assert with_draft[1].best.num_speculative_tokens == 0
    assert with_draft[1].best.speedup == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_acceptance_length([0.5, 1.1]), "an acceptance rate of 1.1 is not within 0 and 1"),
        (lambda: mean_acceptance_length([math.nan]), "rate of nan"),
        (lambda: constant_rate_length(0.5, -1), "num_speculative_tokens -1 is below 0"),
        (lambda: rate_of_length(1.5, 0), "num_speculative_tokens 0 is not within 1 and 1,000"),
        (lambda: rate_of_length(4.5, 3), "4.5 is not within 1 and 4, which 3 drafted tokens can give"),
        (lambda: predict([0.5], RoundCost(lambda positions: 0.0)), "a round of 1 drafted tokens costs 0 plain steps"),
        (lambda: predict_batches([0], [0.5], roofline(1, 1)), "batch size 0 is below 1"),
        (lambda: predict_batches([1], [0.5], lambda num_tokens: 0.0), "a step of 1 tokens costs 0; it must be above 0"),
    ],
)
def test_values_out_of_range(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
