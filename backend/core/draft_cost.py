"""`DraftCost`: what drafts cost, in plain steps. Fixed figures, so that a request's tokens do not depend on a clock."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CONTINUED = 32  # requests of a round that the worker carries on by itself


@dataclass(frozen=True, slots=True)
class _Device:
    """A step over n tokens takes 1 + slope (n - 1) times as long as one over a single token.

    Attributes:
        per_draft: of a drafted token besides, in plain steps: attention over more queries, the accept test.
    """

    slope: float
    per_draft: float


# A CPU computes what it verifies: six tokens take 2.1 times as long as one. A card waits for its weights, and doubles the time
# of a step with some 200 tokens; of a model whose steps wait for launches with some 150.
SMALL_ON_CUDA = "cuda, a small model"
_DEVICES = {"cpu": _Device(0.22, 0.0), "cuda": _Device(0.005, 0.025), SMALL_ON_CUDA: _Device(0.0065, 0.01)}


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What a drafted token costs, in plain steps: those that give each request of the same batch one token.

    Attributes:
        draft: of drafting it.
        device: "cpu", "cuda" or `SMALL_ON_CUDA`.
        round: of a round, however many tokens it drafts.
        per_request: of each of its requests besides: what the host does for it while the device has nothing to do.
        found: both together of a round for which drafts were found, where such a round begins without the host, in a graph that
            computes as many tokens for everybody as for the longest draft, see `graph_lengths`; None: there are none such.
        only_in_graphs: rounds that have no graph take many times as long as a plain step, which has one: those beside tokens of
            prompts.
    """

    draft: float = 0.0
    device: str = "cpu"
    round: float = 0.0
    per_request: float = 0.0
    found: float | None = None
    only_in_graphs: bool = False

    def of_round(self, batch_size: int) -> float:
        """Of a round of so many requests for which the host drafts or nothing was found, beside what its tokens cost."""
        return self.round + self.per_request * batch_size

    def verify(self, batch_size: int) -> float:
        """Of verifying a token more for each of so many requests."""
        device = _DEVICES.get(self.device, _DEVICES["cpu"])
        return device.per_draft + device.slope * batch_size / (1 + device.slope * (batch_size - 1))

    def token(self, batch_size: int) -> float:
        """Of both. It is the least acceptance rate with which a draft pays."""
        return self.draft + self.verify(batch_size)


def graph_lengths(longest: int) -> list[int]:
    """Of drafts for which there are graphs, ascending: each half as long as the next, so that few passes are wasted."""
    lengths = [longest]
    while lengths[0] > 1:
        lengths.insert(0, lengths[0] // 2)
    return lengths
