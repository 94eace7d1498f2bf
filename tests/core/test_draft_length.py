"""How many tokens are worth to draft, against the expected length added up term by term."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from backend.core.draft_cost import SMALL_ON_CUDA, DraftCost
from backend.core.draft_length import (
    FIRST_RATE,
    KEPT_SHARE,
    MEMORY,
    MOST_PROBE_STEPS,
    PROBE_STEPS,
    AdaptiveLength,
)
from backend.request import Request
from backend.sampling_params import SamplingParams
from tests.core.paged_machine import generate
from tests.core.speculative_machine import SpeculativeLab
from tests.core.test_async_scheduling import prompt_of


def request_with(rate: float | None) -> Request:
    request = Request("a", [1], SamplingParams(), frozenset(), 0.0)
    request.draft_rate = rate
    return request


def expected_speedup(rate: float, k: int, draft: float, verify: float, of_round: float = 0.0) -> float:
    """Leviathan et al. 2023, theorem 3.8, with a verification that is not free."""
    mean_accepted = sum(rate**n for n in range(1, k + 1))
    return (1 + mean_accepted) / (1 + of_round * (k > 0) + k * draft + k * verify)


def verify_cost(batch_size: int, slope: float, per_draft: float = 0.0) -> float:
    """From the time of a step over n tokens, 1 + slope (n - 1): what one more for each request adds, in plain steps."""

    def step(num_tokens: int) -> float:
        return 1 + slope * (num_tokens - 1)

    return (step(2 * batch_size) - step(batch_size)) / step(batch_size) + per_draft


COSTS = {"cpu": (0.22, 0.0), "cuda": (0.005, 0.025), SMALL_ON_CUDA: (0.0065, 0.01)}


@pytest.mark.parametrize(("device", "slope", "per_draft"), [(device, *cost) for device, cost in COSTS.items()])
@pytest.mark.parametrize("batch_size", [1, 2, 16, 256])
def test_verifying_costs_what_the_tokens_add_to_a_step(
    batch_size: int, device: str, slope: float, per_draft: float
) -> None:
    expected = verify_cost(batch_size, slope, per_draft)
    assert DraftCost(0.0, device).verify(batch_size) == pytest.approx(expected)
    assert DraftCost(0.3, device).token(batch_size) == pytest.approx(0.3 + expected)


@pytest.mark.parametrize("draft", [0.0, 0.1, 0.45])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.25, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("device", COSTS)
@pytest.mark.parametrize(("of_any", "per_request"), [(0.0, 0.0), (0.1, 0.0), (1.1, 0.0), (0.05, 0.04)])
def test_it_is_the_number_with_the_most_tokens_per_time(
    of_any: float, per_request: float, device: str, rate: float, batch_size: int, draft: float
) -> None:
    verify, of_round = verify_cost(batch_size, *COSTS[device]), of_any + per_request * batch_size
    length = AdaptiveLength(7, DraftCost(draft, device, of_any, per_request))
    limits = length.limits([request_with(rate) for _ in range(batch_size)])
    assert len(set(limits)) == 1
    assert expected_speedup(rate, limits[0], draft, verify, of_round) == pytest.approx(
        max(expected_speedup(rate, k, draft, verify, of_round) for k in range(8))
    )
    if not of_round:
        assert bool(limits[0]) == (rate > draft + verify), "a draft pays that is accepted more often than it costs"


@pytest.mark.parametrize(("draft", "of_any"), [(0.0, 0.0), (0.06, 0.09), (0.2, 0.1)])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_length_is_kept_that_is_about_as_good_as_the_best(batch_size: int, draft: float, of_any: float) -> None:
    """While a rate wanders: it never loses against plain decoding, and changes where it gains a twentieth, to the best one."""
    length = AdaptiveLength(5, DraftCost(draft, SMALL_ON_CUDA, of_any))
    verify = verify_cost(batch_size, *COSTS[SMALL_ON_CUDA])
    rng, rate, kept, num_changes, num_best_changes, last_best = random.Random(7), 0.6, None, 0, 0, None
    requests, num_probes = [request_with(rate) for _ in range(batch_size)], 0
    for _ in range(2000):
        rate = round(min(0.95, max(0.0, rate + rng.uniform(-0.05, 0.05))), 2)
        for request in requests:
            request.draft_rate = rate
        (k,) = set(length.limits(requests))
        if k == 1 and requests[0].draft_length == 0:
            num_probes += 1
            continue
        speeds = [expected_speedup(rate, each, draft, verify, of_any) for each in range(6)]
        best = speeds.index(max(speeds))
        assert speeds[k] >= 1.0 - 1e-9
        assert speeds[k] >= KEPT_SHARE * max(speeds) - 1e-9
        if kept is not None and k != kept:
            assert k == best or k == 0
            assert speeds[kept] < max(1.0, KEPT_SHARE * max(speeds)) + 1e-9
            num_changes += 1
        num_best_changes += last_best is not None and best != last_best
        kept, last_best = k, best
    assert 0 < num_changes < num_best_changes / 2
    assert num_probes <= 2000 / PROBE_STEPS


def test_a_step_in_which_everybody_drafts_anyway_is_no_probe() -> None:
    """So rounds go on being repeated through it."""
    length, requests = AdaptiveLength(5, DraftCost()), [request_with(0.8), request_with(0.7)]
    limits = length.limits(requests)
    assert all(limits)
    assert all(length.repeats(requests, limits) for _ in range(3 * PROBE_STEPS))


def test_it_is_off_where_too_many_requests_decode() -> None:
    """With the same rate: what verifying costs grows with the batch, up to a plain step for each token."""
    length = AdaptiveLength(5, DraftCost(0.0, "cpu"))
    on = {size: bool(length.limits([request_with(0.6)] * size)[0]) for size in (1, 2, 4, 8, 16)}
    assert on == {1: True, 2: True, 4: True, 8: False, 16: False}
    assert [verify_cost(size, 0.22) < 0.6 for size in on] == list(on.values())


def test_one_whose_drafts_are_good_does_not_hold_up_all_the_others() -> None:
    """Drafting takes its time however few it is for: worth it for one alone, and not beside seven who get nothing of it."""
    cost = DraftCost(0.3, "cuda")
    good, bad = request_with(0.95), [request_with(0.0) for _ in range(7)]
    (alone,) = AdaptiveLength(5, cost).limits([good])
    assert alone > 0
    k = max(range(6), key=lambda k: expected_speedup(0.95, k, 0.3, verify_cost(8, 0.005, 0.025)))
    assert k > 0
    mean_length = (7 + sum(0.95**n for n in range(k + 1))) / 8
    assert mean_length < 1 + 0.3 * k
    assert AdaptiveLength(5, cost).limits([good, *bad]) == [0] * 8


def probes_of(length: AdaptiveLength, requests: list[Request], num_steps: int) -> list[int]:
    """In which of these steps, counted from 1, all that lose are drafted for; all refused."""
    probes = []
    for step in range(1, num_steps + 1):
        limits = length.limits(requests)
        assert limits in ([0] * len(requests), [1] * len(requests)), "all in one step"
        if any(limits):
            probes.append(step)
            for request in requests:
                length.learn(request, 1, 0)
    return probes


def test_requests_that_lose_are_tried_again_ever_more_rarely() -> None:
    """Twice as late after each time, up to the most; and soon again where such a draft was accepted."""
    length, requests = AdaptiveLength(5, DraftCost(0.0, "cpu")), [request_with(0.05), request_with(0.1)]
    waits = [PROBE_STEPS]
    while waits[-1] < MOST_PROBE_STEPS:
        waits.append(2 * waits[-1])
    waits.append(waits[-1])
    assert probes_of(length, requests, sum(waits)) == list(accumulate(waits))
    while not any(length.limits(requests)):
        pass
    for request in requests:
        length.learn(request, 1, 1)
    for request in requests:
        request.draft_rate = 0.05
    assert probes_of(length, requests, 1 + 3 * PROBE_STEPS)[:2] == [1, 1 + 2 * PROBE_STEPS]
    assert length.limits([]) == []


def test_a_text_in_which_nothing_is_found_is_given_up_after_a_few_rounds() -> None:
    """Where the host looks up in vain while the device waits: an average of as long a memory as later would try ten times."""
    length, request = AdaptiveLength(5, DraftCost(0.0, SMALL_ON_CUDA, 0.6, 0.06)), request_with(None)
    num_rounds = 0
    while length.limits([request])[0]:
        num_rounds += 1
        length.learn(request, 0, 0)
    assert 1 < num_rounds < 5

    def pays(share: float) -> bool:
        cost = verify_cost(1, *COSTS[SMALL_ON_CUDA])
        found = (expected_speedup(FIRST_RATE, k, 0.0, 0.0) - 1 for k in range(1, 6))
        return any((1 + share * more) / (1 + 0.66 + share * k * cost) >= 1 for k, more in enumerate(found, 1))

    assert pays(MEMORY**9)
    assert not pays(MEMORY**10)


@pytest.mark.parametrize("draft", [0.0, 0.47, 2.0])
@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_drafts_that_are_never_right_cost_little_in_the_long_run(device: str, batch_size: int, draft: float) -> None:
    """1,000 steps by the model of time that the rule uses: beside plain decoding a few per cent are lost."""
    length, cost = AdaptiveLength(5, DraftCost(draft, device)), DraftCost(draft, device)
    requests, time = [request_with(None) for _ in range(batch_size)], 0.0
    for _ in range(1000):
        limits = length.limits(requests)
        time += 1 + draft * max(limits) + cost.verify(batch_size) * sum(limits) / batch_size
        for request, k in zip(requests, limits, strict=True):
            if k:
                length.learn(request, k, 0)
    assert time < 1000 * (1.03 + draft / PROBE_STEPS)


@pytest.mark.parametrize("rate", [0.15, 0.5, 0.9])
def test_the_rate_of_a_request_is_learnt_from_its_rounds(rate: float) -> None:
    """Tokens accepted independently: the estimate's mean is the rate they are drawn with."""
    length, request, rng, seen = AdaptiveLength(5, DraftCost()), request_with(None), random.Random(1), []
    for _ in range(3000):
        accepted = 0
        while accepted < 5 and rng.random() < rate:
            accepted += 1
        length.learn(request, 5, accepted)
        seen.append(request.draft_rate)
    # A round ends with a miss more often than a token is one: weighed by tokens, not by rounds.
    assert sum(seen[100:]) / len(seen[100:]) == pytest.approx(rate, abs=0.08)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("of_any", [0.0, 0.4])
def test_rounds_that_find_nothing_count_where_a_round_costs_anything(of_any: float, share: float) -> None:
    """A look-up is free where the device does not wait for it: then what is found now and then still pays.

    As in the engine, nothing is learnt of a step in which nobody may draft. Shares that just pay are not among these: one that
    wanders below that turns drafts off until probes have found enough again.
    """
    num_steps, rng = 400, random.Random(3)
    length = AdaptiveLength(5, DraftCost(0.0, "cuda", of_any))
    request = request_with(0.6)
    verify = verify_cost(1, *COSTS["cuda"])
    num_on = 0
    for _ in range(num_steps):
        (k,) = length.limits([request])
        num_on += k > 0
        if k:
            is_found = rng.random() < share
            length.learn(request, k * is_found, min(k, 2) * is_found)
            request.draft_rate = 0.6
    assert max(expected_speedup(0.6, k, 0.0, verify) for k in range(6)) > 1

    def mean_speedup(k: int) -> float:
        lengths = share * (expected_speedup(0.6, k, 0.0, 0.0) - 1)
        return (1 + lengths) / (1 + of_any + share * k * verify)

    pays = max(mean_speedup(k) for k in range(1, 6)) > 1
    assert num_on > 0.9 * num_steps if pays or not of_any else num_on < 0.2 * num_steps


@pytest.mark.parametrize("num_dry", range(300, 300 + PROBE_STEPS, 5))
def test_a_text_that_begins_to_repeat_is_drafted_for_again(num_dry: int) -> None:
    """Behind a stretch in which nothing was found, at the cost of a round whose look-up the device waits for.

    Each probe that finds something moves the share of rounds that do by 7 % of what is missing of 1, and is followed by another.
    """
    length, request = AdaptiveLength(5, DraftCost(0.0, SMALL_ON_CUDA, 0.4, 0.04)), request_with(None)
    for _ in range(num_dry):
        (k,) = length.limits([request])
        if k:
            length.learn(request, 0, 0)
    assert request.draft_length == 0, "it is off"
    num_steps = 0
    while request.draft_length == 0:
        num_steps += 1
        (k,) = length.limits([request])
        if k:
            length.learn(request, k, k)
    assert num_steps <= 2 * PROBE_STEPS


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


def test_steps_that_are_passed_over_are_those_that_would_have_no_drafts() -> None:
    """Of two alike, one asked for limits and the other whether a step is passed over: the probes come at the same steps."""
    rng, asked, skipping = random.Random(5), AdaptiveLength(5, DraftCost()), AdaptiveLength(5, DraftCost())
    seen = set()
    for _ in range(4 * PROBE_STEPS):
        requests = [request_with(rng.choice([0.05, 0.05, 0.05, 0.6]))]
        has_drafts = any(asked.limits(requests))
        assert skipping.passes_over(requests) is not has_drafts
        if has_drafts:
            skipping.limits(requests)  # as a step does that comes then
        seen.add(has_drafts)
    assert seen == {False, True}


@pytest.mark.parametrize(("draft", "device", "of_any"), [(0.9, "cpu", 0.0), (0.3, "cuda", 4.0), (0.0, "cuda", 6.0)])
def test_what_would_not_pay_if_all_were_right_is_not_probed(draft: float, device: str, of_any: float) -> None:
    """Five drafts that are all accepted save five plain steps, and cost as many: to try some in between only costs."""
    assert of_any + 5 * (draft + verify_cost(2, *COSTS[device])) > 5
    length, requests = AdaptiveLength(5, DraftCost(draft, device, of_any)), [request_with(None), request_with(None)]
    for _ in range(3 * PROBE_STEPS):
        assert length.limits(requests) == [0, 0]
        assert length.passes_over(requests)


def test_probes_of_which_half_are_right_come_to_an_end() -> None:
    """One text repeats itself and two do not: as a batch they lose, by what a round costs."""
    length = AdaptiveLength(5, DraftCost(0.0, SMALL_ON_CUDA, 3.0))
    requests, num_drafting = [request_with(None) for _ in range(2)], 0
    for _ in range(3000):
        limits = length.limits(requests)
        num_drafting += any(limits)
        for request, k, is_right in zip(requests, limits, (True, False), strict=True):
            if k:
                length.learn(request, k if is_right else 0, k if is_right else 0)
    assert num_drafting < 0.6 * 3000
