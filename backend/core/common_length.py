"""`CommonLength`: one number of drafted tokens for all requests of a step, where a graph computes as many for each anyway."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from backend.analysis.speculation import constant_rate_length
from backend.core.draft_cost import DraftCost, graph_lengths

_RESOLUTION = 100  # of rates


class CommonLength:
    """How fast a step is with each length; `AdaptiveLength` chooses among them.

    Args:
        most: tokens of a draft.
    """

    def __init__(self, most: int, cost: DraftCost) -> None:
        assert cost.found is not None
        self._cost = cost
        self._found = cost.found
        # Tokens of a round beyond the first, by the rate in parts of _RESOLUTION.
        self._further = {
            k: [constant_rate_length(part / _RESOLUTION, k) - 1 for part in range(_RESOLUTION + 1)]
            for k in graph_lengths(most)
        }

    def speeds(self, known: Sequence[tuple[float, float]]) -> dict[int, float]:
        """Of each length, 0 among them, in times plain decoding's.

        Args:
            known: of each request, how often a drafted token is accepted and how often there is anything to draft.
        """
        size = len(known)
        any_found = 1 - prod(1 - share for _, share in known)
        waiting = (1 - any_found) * self._cost.of_round(size)
        per_token = self._cost.token(size)
        parts = [(round(rate * _RESOLUTION), share) for rate, share in known]
        speeds = {0: 1.0}
        for k, further in self._further.items():
            num_further = sum(share * further[part] for part, share in parts) / size
            speeds[k] = (1 + num_further) / (1 + waiting + any_found * (self._found + k * per_token))
        return speeds
