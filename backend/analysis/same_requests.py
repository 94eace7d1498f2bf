"""Whether two runs were asked the same: else what they took says nothing about their settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

TOLERANCE_S = 1e-3  # arrivals are planned, so they differ by rounding only

_LENGTHS = {"num_prompt_tokens": "prompt lengths", "num_output_tokens": "answer lengths"}


def request_differences(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[str]:
    """In words, each a clause; empty when the two runs' measured requests arrived alike with the same lengths.

    Args:
        first, second: request records by column name; arrivals count from each run's first.
    """
    ours, theirs = _by_place(first), _by_place(second)
    if not ours or not theirs:
        return []
    clauses = []
    if len(ours) != len(theirs):
        clauses.append(f"one has {len(ours):,} requests and the other {len(theirs):,}")
    common = sorted(ours.keys() & theirs.keys())
    starts = [min(row["arrival_time"] for row in rows.values()) for rows in (ours, theirs)]
    shifts = [
        abs((ours[place]["arrival_time"] - starts[0]) - (theirs[place]["arrival_time"] - starts[1])) for place in common
    ]
    late = sum(shift > TOLERANCE_S for shift in shifts)
    if late:
        clauses.append(f"{late:,} of {len(common):,} requests arrived at other times, up to {max(shifts):.3g} s apart")
    for column, name in _LENGTHS.items():
        unlike = sum(ours[place][column] != theirs[place][column] for place in common)
        if unlike:
            clauses.append(f"{unlike:,} of {len(common):,} requests have other {name}")
    return clauses


def _by_place(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], Mapping[str, Any]]:
    """By position in the workload, and among the samples of one prompt."""
    samples: Counter[int] = Counter()
    found = {}
    for row in rows:
        if not row["warmup"] and row["arrival_time"] is not None:
            found[row["index"], samples[row["index"]]] = row
            samples[row["index"]] += 1
    return found
