"""What speculation gives and costs, in closed form (Leviathan, Kalman and Matias, "Fast inference from transformers via
speculative decoding", ICML 2023).

A rate is that of a position: how often its drafted token is accepted in rounds in which all before it were. Costs are in plain
steps, the time in which the same batch gets one token each. A round drafts k tokens, verifies k + 1 positions at once, and
yields the accepted tokens and one more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

MAX_NUM_TOKENS = 1000  # drafted in a round, that a rate is solved for

StepCost = Callable[[int], float]  # tokens of a step -> its time, in any unit


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Of a round, in plain steps.

    Attributes:
        verify: positions verified (k + 1) -> cost. The paper's is 1 whatever their number.
        draft_token: for each drafted token: a draft model's step, c in the paper.
        draft_round: once a round, however many are drafted: heads that run side by side, a look-up.
    """

    verify: Callable[[int], float] = lambda num_positions: 1.0
    draft_token: float = 0.0
    draft_round: float = 0.0

    def draft(self, k: int) -> float:
        return self.draft_round + k * self.draft_token if k else 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of rounds that draft `num_speculative_tokens`, beside plain decoding."""

    num_speculative_tokens: int
    mean_acceptance_length: float  # tokens of a round
    draft_cost: float  # of a round, in plain steps; so the next
    verify_cost: float

    @property
    def speedup(self) -> float:
        """Tokens per time, over those of plain decoding."""
        return self.mean_acceptance_length / (self.draft_cost + self.verify_cost)

    @property
    def arithmetic(self) -> str:
        return (
            f"{self.mean_acceptance_length:.3f} tokens / ({self.draft_cost:.3f} draft + {self.verify_cost:.3f} verify) "
            f"plain steps = ×{self.speedup:.2f}"
        )


@dataclass(frozen=True, slots=True)
class BatchPrediction:
    """Of a batch of `batch_size` requests that all decode."""

    batch_size: int
    fixed: Prediction  # with all the tokens that there are rates for
    best: Prediction


def acceptance_probability(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """How often a token drawn from a draft's distribution is accepted: the sum of min(target, draft), 1 - total variation.

    Raises:
        ValueError: the distributions have different lengths.
    """
    return math.fsum(min(p, q) for p, q in zip(target_probs, draft_probs, strict=True))


def mean_acceptance_length(rates: Sequence[float]) -> float:
    """Tokens of a round on average, the recovered or bonus token included: 1 + r1 + r1 r2 + ... + r1 ... rk.

    Args:
        rates: of each drafted position, 0 to 1; none: plain decoding.
    Raises:
        ValueError: a rate is not within 0 and 1.
    """
    return 1 + math.fsum(_reached(rates))


def constant_rate_length(rate: float, num_speculative_tokens: int) -> float:
    """The same for one rate at every position: (1 - rate^(k+1)) / (1 - rate).

    Raises:
        ValueError: the rate is not within 0 and 1, or k below 0.
    """
    _check_rates((rate,))
    _check_count(num_speculative_tokens)
    if rate > 1 - 1e-6:  # where the quotient would lose its digits
        return math.fsum(rate**n for n in range(num_speculative_tokens + 1))
    return (1 - rate ** (num_speculative_tokens + 1)) / (1 - rate)


def rate_of_length(length: float, num_speculative_tokens: int) -> float:
    """The one rate at every position that gives this mean acceptance length; the inverse of `constant_rate_length`.

    Raises:
        ValueError: k is not within 1 and 1,000, or the length not within 1 and k + 1.
    """
    if not 1 <= num_speculative_tokens <= MAX_NUM_TOKENS:
        raise ValueError(f"num_speculative_tokens {num_speculative_tokens} is not within 1 and {MAX_NUM_TOKENS:,}")
    if not 1 <= length <= num_speculative_tokens + 1:
        raise ValueError(
            f"a mean acceptance length of {length:g} is not within 1 and {num_speculative_tokens + 1}, "
            f"which {num_speculative_tokens} drafted tokens can give"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if constant_rate_length(middle, num_speculative_tokens) < length:
            low = middle
        else:
            high = middle
    return high


def accepted_distribution(rates: Sequence[float]) -> list[float]:
    """Share of the rounds in which 0, 1, ... k drafted tokens are accepted. Raises `ValueError` as `mean_acceptance_length`."""
    reached = [1.0, *_reached(rates)]
    return [share * (1 - rate) for share, rate in zip(reached, [*rates, 0.0], strict=True)]


def predict(rates: Sequence[float], cost: RoundCost) -> Prediction:
    """Of rounds that draft a token for each rate.

    Raises:
        ValueError: a rate is not within 0 and 1, or a round would cost nothing.
    """
    k = len(rates)
    prediction = Prediction(k, mean_acceptance_length(rates), cost.draft(k), cost.verify(k + 1) if k else 1.0)
    if not prediction.draft_cost + prediction.verify_cost > 0:
        raise ValueError(
            f"a round of {k} drafted tokens costs {prediction.draft_cost + prediction.verify_cost:g} plain steps"
        )
    return prediction


def predict_each(rates: Sequence[float], cost: RoundCost) -> list[Prediction]:
    """With the first 0, 1, ... of the rates; 0 is plain decoding. Raises as `predict`."""
    return [predict(rates[:k], cost) for k in range(len(rates) + 1)]


def best_prediction(rates: Sequence[float], cost: RoundCost) -> Prediction:
    """The fastest of `predict_each`, the fewest tokens among equals: 0 where speculation loses. Raises as `predict`."""
    return max(predict_each(rates, cost), key=lambda prediction: prediction.speedup)


def predict_batches(
    batch_sizes: Sequence[int],
    rates: Sequence[float],
    step_cost: StepCost,
    draft_step_cost: StepCost = lambda num_tokens: 0.0,
) -> list[BatchPrediction]:
    """Of batches in which every request decodes, drafts and is verified at the same time.

    A step over few tokens takes as long as its weights take to read, whatever their number, and then grows with it: verifying
    is nearly free for one request and costs as much as it gives for many.

    Args:
        batch_sizes: requests, each 1 at least.
        step_cost: of the target's step, by its tokens: one for each request of a plain step, k + 1 of one that verifies.
        draft_step_cost: of a step of the draft, by its tokens, one for each request; in the same unit.
    Raises:
        ValueError: a batch size is below 1, a plain step costs nothing, or as `predict`.
    """
    found = []
    for batch_size in batch_sizes:
        if batch_size < 1:
            raise ValueError(f"batch size {batch_size} is below 1")
        plain = step_cost(batch_size)
        if not plain > 0:
            raise ValueError(f"a step of {batch_size:,} tokens costs {plain:g}; it must be above 0")
        cost = RoundCost(
            verify=lambda positions, n=batch_size, plain=plain: step_cost(n * positions) / plain,
            draft_token=draft_step_cost(batch_size) / plain,
        )
        found.append(BatchPrediction(batch_size, predict(rates, cost), best_prediction(rates, cost)))
    return found


def _reached(rates: Sequence[float]) -> list[float]:
    """Share of the rounds in which the tokens up to each position are all accepted."""
    _check_rates(rates)
    return list(accumulate(rates, mul))


def _check_rates(rates: Sequence[float]) -> None:
    for rate in rates:
        if not 0 <= rate <= 1:
            raise ValueError(f"an acceptance rate of {rate:g} is not within 0 and 1")


def _check_count(num_speculative_tokens: int) -> None:
    if num_speculative_tokens < 0:
        raise ValueError(f"num_speculative_tokens {num_speculative_tokens} is below 0")
