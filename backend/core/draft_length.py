"""`AdaptiveLength`: how many tokens to draft for a request, by how many of its drafts were accepted lately.

The number with which a round is expected to yield most tokens per time, in the closed form of Leviathan et al. 2023 for one rate
at every position. Time is not measured but taken from fixed costs: so a request's tokens do not depend on a clock.
"""

from __future__ import annotations

from backend.analysis.speculation import constant_rate_length
from backend.request import Request

# Of each token that is verified beside the first, in plain steps: a step of six tokens takes 2.1 plain ones on a CPU, which has
# to compute them, and hardly more than one on a card, which waits for its weights.
VERIFY_COST = {"cpu": 0.22, "cuda": 0.03}
FIRST_RATE = 0.6  # of a request of which nothing is known
MEMORY = 0.9  # what a tested token leaves of the rate before it
PROBE_STEPS = 16  # after so many steps without a draft a request is tried again
_RESOLUTION = 100  # of rates


class AdaptiveLength:
    """Args:
    most: tokens of a draft.
    token_cost: of each drafted token and its verification, in plain steps.
    """

    def __init__(self, most: int, token_cost: float) -> None:
        self._best = [
            max(
                range(most + 1),
                key=lambda k, rate=place / _RESOLUTION: constant_rate_length(rate, k) / (1 + token_cost * k),
            )
            for place in range(_RESOLUTION + 1)
        ]

    def limit(self, request: Request) -> int:
        """How many tokens to draft for a request in this step; 0 where drafts would cost more than they bring."""
        rate = FIRST_RATE if request.draft_rate is None else request.draft_rate
        best = self._best[round(rate * _RESOLUTION)]
        if best:
            request.num_steps_off = 0
            return best
        request.num_steps_off = (request.num_steps_off + 1) % PROBE_STEPS
        return int(request.num_steps_off == 0)

    def learn(self, request: Request, num_draft_tokens: int, num_accepted: int) -> None:
        """A round of the request has ended."""
        rate = FIRST_RATE if request.draft_rate is None else request.draft_rate
        rate = 1 - (1 - rate) * MEMORY**num_accepted
        request.draft_rate = rate * MEMORY if num_accepted < num_draft_tokens else rate
