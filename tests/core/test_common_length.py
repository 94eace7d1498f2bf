"""One length for all requests of a round in graphs, against the expected tokens and time added up by cases."""

from __future__ import annotations

import random
from itertools import product

import pytest

from backend.core.common_length import CommonLength
from backend.core.draft_cost import MAX_CONTINUED, SMALL_ON_CUDA, DraftCost, graph_lengths
from backend.core.draft_length import FIRST_RATE, KEPT_SHARE, MOST_PROBE_STEPS, AdaptiveLength, choose_length
from tests.core.test_draft_length import request_with, verify_cost

HEAD = DraftCost(0.04, SMALL_ON_CUDA, 0.05, 0.06, 0.25)
TEXT = DraftCost(0.0, SMALL_ON_CUDA, 0.6, 0.06, 0.35)


def speed(known: list[tuple[float, float]], k: int, cost: DraftCost) -> float:
    """Expected tokens over expected time, of every combination of requests for which something is found."""
    size = len(known)
    assert cost.found is not None
    tokens = time = 0.0
    for found in product((False, True), repeat=size):
        chance = 1.0
        for is_found, (_, share) in zip(found, known, strict=True):
            chance *= share if is_found else 1 - share
        accepted = sum(
            sum(rate**n for n in range(1, k + 1)) for is_found, (rate, _) in zip(found, known, strict=True) if is_found
        )
        per_token = cost.draft + verify_cost(size, 0.0065, 0.01)
        tokens += chance * (1 + accepted / size)
        time += chance * (1 + (cost.found + k * per_token if any(found) else cost.round + cost.per_request * size))
    return tokens / time


@pytest.mark.parametrize("cost", [HEAD, TEXT])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_it_is_the_graph_s_length_with_the_most_tokens_per_time(size: int, cost: DraftCost) -> None:
    rng, length, chosen = random.Random(size), CommonLength(5, cost), set()
    assert graph_lengths(5) == [1, 2, 5]
    for _ in range(60):
        known = [(round(rng.random(), 2), round(rng.random(), 2)) for _ in range(size)]
        expected = {0: 1.0} | {k: speed(known, k, cost) for k in graph_lengths(5)}
        assert length.speeds(known) == pytest.approx(expected)
        k = choose_length(length.speeds(known), None)
        assert expected[k] == pytest.approx(max(expected.values()))
        chosen.add(k)
    assert len(chosen) > 1


def test_a_length_is_kept_that_is_about_as_good() -> None:
    """Also one for which there is a graph only; and none that loses."""
    length, known = CommonLength(5, HEAD), [(0.6, 1.0)] * 4
    speeds = length.speeds(known)
    best = max(speeds, key=speeds.__getitem__)
    close = [k for k in speeds if k != best and KEPT_SHARE * speeds[best] <= speeds[k] < speeds[best]]
    assert close
    assert all(choose_length(speeds, kept) == kept for kept in close)
    assert choose_length(speeds, 3) == best
    assert choose_length(length.speeds([(0.0, 1.0)] * 4), best) == 0


def test_new_requests_take_the_length_of_those_beside_them() -> None:
    """So that a round goes on as the last one did; and all have the same, as the graph computes as many for each."""
    length = AdaptiveLength(5, HEAD)
    requests = [request_with(rate) for rate in (0.55, 0.6, 0.65)]
    (k,) = set(length.limits(requests))
    assert k > 0
    assert length.limits([*requests, request_with(None), request_with(0.1)]) == [k] * 5


def test_more_requests_than_a_graph_takes_have_their_own() -> None:
    requests = [request_with(rate) for rate in (0.9, 0.3)] * (MAX_CONTINUED // 2)
    free = DraftCost(0.0, "cuda", found=0.0)
    assert len(set(AdaptiveLength(5, free).limits(requests))) == 1
    assert len(set(AdaptiveLength(5, free).limits([*requests, request_with(0.9)]))) == 2


@pytest.mark.parametrize("cost", [HEAD, TEXT])
@pytest.mark.parametrize("size", [1, 16])
def test_what_was_learnt_of_others_is_the_first_guess_of_a_new_request(size: int, cost: DraftCost) -> None:
    """Where drafts are never right, only the first requests are tried anew each time; later ones are probed with the others."""
    length, num_steps, drafted = AdaptiveLength(5, cost), 128, []
    for _ in range(50):
        requests, num_drafting = [request_with(None) for _ in range(size)], 0
        for _ in range(num_steps):
            limits = length.limits(requests)
            num_drafting += any(limits)
            for request, k in zip(requests, limits, strict=True):
                if k:
                    length.learn(request, k if cost is HEAD else 0, 0)
        drafted.append(num_drafting)
    assert drafted[0] > 2
    assert sum(drafted[-10:]) <= 10 * num_steps / MOST_PROBE_STEPS + 1


def test_good_drafts_are_taken_up_again_after_bad_ones() -> None:
    """By a probe, from which on new requests are drafted for from the beginning."""
    length = AdaptiveLength(5, HEAD)
    for is_right in (False, True):
        num_off = 0
        for _ in range(30):
            request = request_with(None)
            for _ in range(100):
                (k,) = length.limits([request])
                num_off += k == 0
                if k:
                    length.learn(request, k, k if is_right else 0)
        assert num_off < 2 * MOST_PROBE_STEPS if is_right else num_off > 2500
    assert length.limits([request_with(None)]) == [5]
    assert AdaptiveLength(5, HEAD).limits([request_with(None)]) == AdaptiveLength(5, HEAD).limits(
        [request_with(FIRST_RATE)]
    )


def test_drafts_that_pay_a_little_are_not_given_up_for_a_few_bad_ones() -> None:
    """Accepted a third of the time, two save more than they cost; what luck leaves out, nobody would see again for long."""
    cost, rng, num_steps, num_drafting = DraftCost(0.02, SMALL_ON_CUDA, found=0.2), random.Random(1), 0, 0
    assert speed([(0.36, 1.0)], 2, cost) > 1.1
    length = AdaptiveLength(4, cost)
    for _ in range(40):
        request, num_tokens = request_with(None), 0
        while num_tokens < 128:
            (k,) = length.limits([request])
            num_accepted = 0
            while num_accepted < k and rng.random() < 0.36:
                num_accepted += 1
            if k:
                length.learn(request, k, num_accepted)
            num_tokens += num_accepted + 1
            num_steps, num_drafting = num_steps + 1, num_drafting + (k > 0)
    assert num_drafting > 0.35 * num_steps
