"""What the stored results of kernel runs say: timings with their checks, and runs side by side. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Key = tuple[str, str, str, str]  # op, shape, dtype, implementation


@dataclass(frozen=True, slots=True)
class ComparedTiming:
    """One timing in several runs, in their order. What a run does not have is None."""

    op: str
    shape: str
    dtype: str
    implementation: str
    p50_us: tuple[float | None, ...]
    ratios: tuple[float | None, ...]  # the baseline's p50 over the run's: above 1 is faster than the baseline
    overlap: tuple[bool, ...]  # the two spreads, p20 to p80, overlap: no difference is shown


def timings(results: Sequence[Row]) -> list[Row]:
    """The results that have a time, each with the outcome of its kernel's check: on the same shape, else on small inputs.

    An op that the run did not check has None there. A reference's timing carries the check of its kernel.
    """
    checks = {(row["op"], row["shape"]): row for row in results if row["experiment"] == "check"}
    rows = []
    for row in results:
        if row["experiment"] != "bench" or row["p50_us"] is None:
            continue
        check = checks.get((row["op"], row["shape"])) or checks.get((row["op"], "default")) or {}
        names = ("max_abs_error", "max_rel_error", "atol", "rtol", "passed", "interpreted")
        rows.append({**row, **{name: check.get(name) for name in names}})
    return rows


def left_out(results: Sequence[Row]) -> list[str]:
    """Which timings there are not, and why; one sentence for all shapes with the same reason."""
    reasons: dict[str, list[str]] = {}
    for row in results:
        if row["experiment"] != "check" and row["p50_us"] is None and row["problem"]:
            names = reasons.setdefault(row["problem"], [])
            name = f"{row['op']} {row['shape']}"
            names += [] if name in names else [name]
    return [f"{'; '.join(names)}: {reason}" for reason, names in reasons.items()]


def compare_timings(runs: Sequence[Sequence[Row]], baseline: int = 0) -> list[ComparedTiming]:
    """Every timing that two runs at least have.

    Args:
        runs: the results of each run.
        baseline: place of the run that the others are compared with.
    """
    by_key: list[dict[Key, Row]] = [
        {(row["op"], row["shape"], row["dtype"], row["implementation"]): row for row in timings(results)}
        for results in runs
    ]
    compared = []
    for key in dict.fromkeys(key for rows in by_key for key in rows):
        rows = [found.get(key) for found in by_key]
        if sum(row is not None for row in rows) < 2:
            continue
        base = rows[baseline]
        compared.append(
            ComparedTiming(
                *key,
                p50_us=tuple(None if row is None else row["p50_us"] for row in rows),
                ratios=tuple(None if row is None or base is None else base["p50_us"] / row["p50_us"] for row in rows),
                overlap=tuple(row is not None and base is not None and _overlap(row, base) for row in rows),
            )
        )
    return compared


def _overlap(row: Row, other: Row) -> bool:
    return row["p20_us"] <= other["p80_us"] and other["p20_us"] <= row["p80_us"]
