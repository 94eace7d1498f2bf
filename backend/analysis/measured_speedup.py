"""What a run gained by speculation, from its own rounds and the steps of a run of the same workload without it.

A plain step of n requests gives each a token; a step that verifies gives each as many as its round has. Costs are in plain steps
of as many requests, the unit of `backend.analysis.speculation`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backend.analysis.draft_rounds import PositionRate, RoundColumns, acceptance_length
from backend.analysis.speculation import Prediction, RoundCost, predict_each

# Methods whose draft costs the same however long it is.
ONCE_A_ROUND = frozenset({"ngram", "medusa", "lookahead", "synthetic"})

StepRow = Mapping[str, Any]  # of `StepStats`, by name


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Means over the steps with rounds and without tokens of prompts.

    Attributes:
        num_drafted: tokens of a round.
        other_ms: of such a step, neither drafting nor verifying: scheduling, records, text.
        plain_ms: the model's time in a plain step of as many requests.
        plain_other_ms: the rest of such a step.
    """

    num_steps: int
    num_drafted: float
    draft_ms: float
    verify_ms: float
    other_ms: float
    plain_ms: float
    plain_other_ms: float

    @property
    def draft_cost(self) -> float:
        return self.draft_ms / self.plain_ms

    @property
    def verify_cost(self) -> float:
        return self.verify_ms / self.plain_ms


@dataclass(frozen=True, slots=True)
class MeasuredSpeedup:
    """Attributes:
    rounds: as they were, drafts of all lengths together.
    share: of the output tokens behind the first ones, that came out of rounds; the others took a plain step each.
    each: by the rates of the positions, with 0, 1, ... tokens a draft.
    """

    times: RoundTimes
    rounds: Prediction
    share: float
    each: list[Prediction]

    @property
    def predicted(self) -> float:
        """Of all tokens behind the first ones."""
        return 1 / (self.share / self.rounds.speedup + 1 - self.share)

    @property
    def best(self) -> Prediction:
        return max(self.each, key=lambda prediction: prediction.speedup)


def measure_speedup(
    rounds: RoundColumns,
    rates: Sequence[PositionRate],
    steps: Sequence[StepRow],
    plain_steps: Sequence[StepRow],
    *,
    num_tokens: int,
    method: str,
) -> MeasuredSpeedup | None:
    """None where no step with rounds, or no plain one, is without tokens of prompts.

    Args:
        rounds: of measured requests.
        rates: of its positions.
        steps: of the same run.
        plain_steps: of the other run, behind its warm-up.
        num_tokens: of the outputs of these requests, without the first ones.
        method: of drafting.
    """
    times = _round_times(rounds, steps, plain_steps)
    length = acceptance_length(rounds)
    if times is None or length is None:
        return None
    by_round = method in ONCE_A_ROUND
    # Verification is measured at one length only: between it and a plain step it is taken to be a straight line.
    slope = (times.verify_cost - 1) / times.num_drafted
    cost = RoundCost(
        verify=lambda num_positions: max(0.0, 1 + slope * (num_positions - 1)),
        draft_token=0.0 if by_round else times.draft_cost / times.num_drafted,
        draft_round=times.draft_cost if by_round else 0.0,
    )
    share = min(1.0, int(rounds.num_emitted.sum()) / num_tokens) if num_tokens else 1.0
    measured = Prediction(round(times.num_drafted), length, times.draft_cost, times.verify_cost)
    return MeasuredSpeedup(times, measured, share, predict_each([each.rate for each in rates], cost))


def _round_times(rounds: RoundColumns, steps: Sequence[StepRow], plain_steps: Sequence[StepRow]) -> RoundTimes | None:
    plain: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in plain_steps:
        if not row["num_prefill_tokens"] and row["num_decode_tokens"]:
            plain[row["num_scheduled_requests"]].append((row["execute_ms"], row["duration_ms"] - row["execute_ms"]))
    known = {row["step"]: row for row in steps if not row["num_prefill_tokens"]}
    numbers, first_rows = np.unique(rounds.step, return_index=True)
    used = [(number, row) for number, row in zip(numbers.tolist(), first_rows.tolist(), strict=True) if number in known]
    if not plain or not used:
        return None
    sizes = sorted(plain)
    means = np.array([np.mean(plain[size], axis=0) for size in sizes])
    batch = [known[number]["num_scheduled_requests"] for number, _ in used]
    rows = np.array([row for _, row in used])
    durations = np.array([known[number]["duration_ms"] for number, _ in used])
    of_rounds = rounds.draft_ms[rows], rounds.verify_ms[rows]
    drafted = rounds.num_drafted[np.isin(rounds.step, [number for number, _ in used])]
    plain_ms, plain_other_ms = (float(np.mean(np.interp(batch, sizes, column))) for column in means.T)
    if not plain_ms > 0:
        return None
    return RoundTimes(
        num_steps=len(used),
        num_drafted=float(drafted.mean()),
        draft_ms=float(of_rounds[0].mean()),
        verify_ms=float(of_rounds[1].mean()),
        other_ms=float(np.mean(durations - of_rounds[0] - of_rounds[1])),
        plain_ms=plain_ms,
        plain_other_ms=plain_other_ms,
    )
