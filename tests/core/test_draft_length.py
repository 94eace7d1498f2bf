"""How many tokens are worth to draft, against the expected length added up term by term."""

from __future__ import annotations

import random

import pytest

from backend.core.draft_length import PROBE_STEPS, AdaptiveLength
from backend.request import Request
from backend.sampling_params import SamplingParams
from tests.core.paged_machine import generate
from tests.core.speculative_machine import SpeculativeLab
from tests.core.test_async_scheduling import prompt_of


def request_with(rate: float | None) -> Request:
    request = Request("a", [1], SamplingParams(), frozenset(), 0.0)
    request.draft_rate = rate
    return request


@pytest.mark.parametrize("cost", [0.0, 0.03, 0.22, 0.6])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.25, 0.5, 0.8, 0.95, 1.0])
def test_it_is_the_number_with_the_most_tokens_per_time(rate: float, cost: float) -> None:
    def per_time(k: int) -> float:
        return sum(rate**n for n in range(k + 1)) / (1 + cost * k)

    limit = AdaptiveLength(7, cost).limit(request_with(rate))
    assert per_time(limit) == pytest.approx(max(per_time(k) for k in range(8)))


def test_a_request_that_loses_is_tried_again_now_and_then() -> None:
    length, request = AdaptiveLength(5, 0.22), request_with(0.05)
    assert [length.limit(request) for _ in range(2 * PROBE_STEPS)] == 2 * [*[0] * (PROBE_STEPS - 1), 1]


@pytest.mark.parametrize("rate", [0.15, 0.5, 0.9])
def test_the_rate_of_a_request_is_learnt_from_its_rounds(rate: float) -> None:
    """Tokens accepted independently: the estimate's mean is the rate they are drawn with."""
    length, request, rng, seen = AdaptiveLength(5, 0.0), request_with(None), random.Random(1), []
    for _ in range(3000):
        accepted = 0
        while accepted < 5 and rng.random() < rate:
            accepted += 1
        length.learn(request, 5, accepted)
        seen.append(request.draft_rate)
    # A round ends with a miss more often than a token is one: weighed by tokens, not by rounds.
    assert sum(seen[100:]) / len(seen[100:]) == pytest.approx(rate, abs=0.08)


def test_drafts_that_are_never_right_are_soon_left_out() -> None:
    lab = SpeculativeLab(num_right=0, num_blocks=200, adaptive=True)
    lab.add("a", prompt_of(5), max_tokens=100)
    assert lab.run()["a"] == generate(prompt_of(5), 100)
    drafted = [step.num_draft_tokens for step in lab.steps]
    assert sum(1 for each in drafted if each) < 20
    always = SpeculativeLab(num_right=5, num_blocks=200, adaptive=True)
    always.add("a", prompt_of(5), max_tokens=100)
    assert always.run()["a"] == generate(prompt_of(5), 100)
    assert len(always.steps) < 30
