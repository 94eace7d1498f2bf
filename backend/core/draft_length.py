"""`AdaptiveLength`: how many tokens to draft for the requests of a step, by how many of their drafts were accepted lately.

The number with which a step is expected to yield most tokens per time, in the closed form of Leviathan et al. 2023 for one rate
at every position:

    speedup = (1 + accepted tokens of a round) / (1 + round cost + k (draft cost + verify cost))

What is looked up in a text is not always found: accepted tokens and the cost of each count by the share of rounds that had
any, and the cost of a round counts whole.

A tree is cut to its first k levels: each costs a draft, and each of its nodes a verification.

Where a round is a graph that computes as many tokens for everybody, all have the same length (`CommonLength`).

A length that is about as good as the best one is kept: rates wander, and a device that repeats a round before its result is
known has to wait whenever the length changes.

A new request begins with what was seen of those before it, and a little more.

Times are not measured but taken from fixed costs, and rates are counted: so a request's tokens do not depend on a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backend.analysis.speculation import constant_rate_length
from backend.core.common_length import CommonLength
from backend.core.draft_cost import MAX_CONTINUED, DraftCost
from backend.request import Request

FIRST_RATE, FIRST_SHARE = 0.6, 1.0  # while nothing is known
MEMORY = 0.93  # what a tested token leaves of the rate before it, and a round of the share of rounds that had drafts
MEMORY_OF_ALL = 0.98  # the same of what all requests have in common, which is the first guess of a new one
# What is left out is hardly ever seen: so the guess is above that, or a few bad drafts would turn off what pays.
OPTIMISM = 0.1
# As so many rounds the first guess of that share counts: the first few that are known say more than it.
WORTH_OF_GUESS = 3
KEPT_SHARE = 0.95  # of the best length's speed, with which another one is kept
# After so many steps a token is drafted for those whose drafts are left out, where right ones would be worth it; and in the next,
# while half of them are right. Where they are not, it is twice as many steps until the next time, up to the most.
PROBE_STEPS, MOST_PROBE_STEPS = 32, 128
_RESOLUTION = 100  # of rates and shares


class AdaptiveLength:
    """Args:
    most: tokens of a draft; of a tree, levels: lengths are then depths, and the rate is that of any node of a level.
    num_nodes: of a tree, drafted tokens down to each depth from 0 on, all of which are verified; None: it is a chain.
    """

    def __init__(self, most: int, cost: DraftCost, num_nodes: Sequence[int] | None = None) -> None:
        self._cost = cost
        self._num_nodes = num_nodes or range(most + 1)
        self._lengths = [
            [constant_rate_length(place / _RESOLUTION, k) for k in range(most + 1)] for place in range(_RESOLUTION + 1)
        ]
        self._common = CommonLength(most, cost) if cost.found is not None and num_nodes is None else None
        self._rate_of_all, self._share_of_all = FIRST_RATE - OPTIMISM, FIRST_SHARE - OPTIMISM
        self._known_speeds: dict[tuple[int, int, int], dict[int, float]] = {}
        self._num_steps = 0
        self._wait = self._next_probe = PROBE_STEPS  # steps between two probes, and the one of the next
        self._last_known: list[tuple[float, float, int | None]] = []  # of `_worth`, and what it gave
        self._last_worth: list[int] = []
        self._is_probe = False  # the last step with drafts; and of those for whom else there would have been none:
        self._num_probed = self._num_whole = 0  # who had one, and whose was accepted whole
        self._num_in_turn = 0  # probes one behind the other

    def limits(self, requests: Sequence[Request]) -> list[int]:
        """How many tokens to draft for each of the requests that decode in a step; 0 where drafts cost more than they bring.

        Drafts of one request hold up all the others: where the step as a whole would lose, nobody drafts.
        """
        if not requests:
            return []
        limits = self._worth(requests)
        self._num_steps += 1
        for request, k in zip(requests, limits, strict=True):
            request.draft_length = k
        # A text may have begun to repeat itself: to see that by one step in so many would take it hundreds.
        was_right = self._is_probe and 2 * self._num_whole >= self._num_probed > 0
        goes_on = was_right and self.may_pay(len(requests)) and self._num_in_turn < PROBE_STEPS
        if all(limits):
            self._wait, self._next_probe = PROBE_STEPS, self._num_steps + PROBE_STEPS
        elif self._is_probe:  # the step before
            self._wait = PROBE_STEPS if was_right else min(2 * self._wait, MOST_PROBE_STEPS)
            self._next_probe = self._num_steps - 1 + self._wait
        self._is_probe = (goes_on or self._is_due(self._num_steps, len(requests))) and not all(limits)
        self._num_in_turn = self._num_in_turn + 1 if goes_on else 0
        self._num_probed = self._num_whole = 0
        # For all in the same step: they share the passes of a draft model.
        return [max(1, k) for k in limits] if self._is_probe else limits

    def passes_over(self, requests: Sequence[Request]) -> bool:
        """Whether a step in which these decode is one without drafts, which then counts as such."""
        return self.repeats(requests, [0] * len(requests))

    def repeats(self, requests: Sequence[Request], limits: Sequence[int]) -> bool:
        """Whether a step in which these decode has these limits, which then counts as such."""
        if requests and self._worth(requests) != list(limits):
            return False
        if not all(limits) and self._is_due(self._num_steps + 1, len(requests)):
            return False
        self._num_steps += 1
        if all(limits):
            self._next_probe = self._num_steps + self._wait
        return True

    def _is_due(self, step: int, batch_size: int) -> bool:
        """Whether in this step, counted from 1, it is to be seen how good drafts are that are left out."""
        return step >= self._next_probe and self.may_pay(batch_size)

    def _worth(self, requests: Sequence[Request]) -> list[int]:
        """As many tokens for each as give most tokens per time, or none for anybody."""
        rate, share = self._first_guess()
        known = [
            (
                rate if it.draft_rate is None else it.draft_rate,
                share if it.draft_share is None else it.draft_share,
                it.draft_length,
            )
            for it in requests
        ]
        if known != self._last_known:  # of a step without drafts nothing is learnt
            self._last_known, self._last_worth = known, self._limits_worth(known)
        return list(self._last_worth)

    def _limits_worth(self, known: Sequence[tuple[float, float, int | None]]) -> list[int]:
        """`known` of each request: its rate, its share and its last length."""
        batch_size = len(known)
        if self._common is not None and batch_size <= MAX_CONTINUED:
            last = {length for _, _, length in known} - {None}
            speeds = self._common.speeds([each[:2] for each in known])
            return [choose_length(speeds, last.pop() if len(last) == 1 else None)] * batch_size
        is_free = not self._cost.of_round(batch_size)  # then a round without drafts is like a plain step
        parts = [
            (round(rate * _RESOLUTION), _RESOLUTION if is_free else round(share * _RESOLUTION))
            for rate, share, _ in known
        ]
        limits = [
            choose_length(self._speeds(batch_size, *each), length)
            for each, (_, _, length) in zip(parts, known, strict=True)
        ]
        num_further = verified = 0.0  # tokens, of all requests
        for (rate, share), k in zip(parts, limits, strict=True):
            num_further += share / _RESOLUTION * (self._lengths[rate][k] - 1)
            verified += share / _RESOLUTION * self._num_nodes[k]
        drafting = self._cost.draft * max(limits)
        verifying = self._cost.verify(batch_size) * verified / batch_size
        time = 1 + self._cost.of_round(batch_size) + drafting + verifying
        was_off = all(length == 0 for _, _, length in known)
        if (1 + num_further / batch_size) * (KEPT_SHARE if was_off else 1.0) <= time:
            limits = [0] * batch_size
        return limits

    def may_pay(self, batch_size: int) -> bool:
        """Whether drafts of so many requests, once left out, would be taken up again if all were right."""
        if self._common is not None and batch_size <= MAX_CONTINUED:
            return KEPT_SHARE * max(self._common.speeds([(1.0, 1.0)] * batch_size).values()) > 1
        return KEPT_SHARE * max(self._speeds(batch_size, _RESOLUTION, _RESOLUTION).values()) > 1

    def pays_at_first(self) -> bool:
        """Whether a request that is alone is drafted for while nothing is known of it."""
        if self._common is not None:
            return choose_length(self._common.speeds([(FIRST_RATE, FIRST_SHARE)]), None) > 0
        return choose_length(self._speeds(1, round(FIRST_RATE * _RESOLUTION), _RESOLUTION), None) > 0

    def learn(self, request: Request, num_draft_tokens: int, num_accepted: int) -> None:
        """A round of the request has ended; without any drafted token there was nothing to draft."""
        if self._is_probe and request.draft_length == 0:
            self._num_probed += 1
            self._num_whole += num_accepted == num_draft_tokens > 0
        request.num_draft_rounds += 1
        gain = max(1 - MEMORY, 1 / (request.num_draft_rounds + WORTH_OF_GUESS))
        first_rate, first_share = self._first_guess()
        share = first_share if request.draft_share is None else request.draft_share
        request.draft_share = share + gain * ((num_draft_tokens > 0) - share)
        self._share_of_all += (1 - MEMORY_OF_ALL) * ((num_draft_tokens > 0) - self._share_of_all)
        if num_draft_tokens:
            is_whole = num_accepted == num_draft_tokens
            rate = first_rate if request.draft_rate is None else request.draft_rate
            request.draft_rate = _learnt(rate, num_accepted, is_whole, MEMORY)
            self._rate_of_all = _learnt(self._rate_of_all, num_accepted, is_whole, MEMORY_OF_ALL)

    def _first_guess(self) -> tuple[float, float]:
        """Rate and share of a request of which nothing is known."""
        return min(self._rate_of_all + OPTIMISM, 1.0), min(self._share_of_all + OPTIMISM, 1.0)

    def _speeds(self, batch_size: int, rate: int, share: int) -> dict[int, float]:
        """Of each length, in times plain decoding's; the rate and the share in parts of `_RESOLUTION`."""
        key = (batch_size, rate, share)
        if key not in self._known_speeds:
            verify, of_round = self._cost.verify(batch_size), self._cost.of_round(batch_size)
            self._known_speeds[key] = speeds = {0: 1.0}
            for k in range(1, len(self._num_nodes)):
                cost = self._cost.draft * k + verify * self._num_nodes[k]
                found = share / _RESOLUTION
                speeds[k] = (1 + found * (self._lengths[rate][k] - 1)) / (1 + of_round + found * cost)
        return self._known_speeds[key]


def choose_length(speeds: Mapping[int, float], kept: int | None) -> int:
    """The fastest length, or `kept`, the last one, which is hardly slower; but none that loses against 0."""
    best = max(speeds, key=speeds.__getitem__)
    if not best or kept is None or kept not in speeds:
        return best
    return kept if speeds[kept] >= max(speeds[0], KEPT_SHARE * speeds[best]) else best


def _learnt(rate: float, num_accepted: int, is_whole: bool, memory: float) -> float:
    """After a draft of which so many tokens were accepted, and then one was not, unless it was whole."""
    rate = 1 - (1 - rate) * memory**num_accepted
    return rate if is_whole else rate * memory
