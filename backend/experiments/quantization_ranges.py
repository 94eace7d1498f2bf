"""What the stored ranges of a variant say: which value of a layer reaches furthest, and how far beyond the rest. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from backend.experiments.ranges import EXPECTED_ORDER, Range


def stored_ranges(results: Iterable[Mapping[str, Any]], variant: str) -> list[Range]:
    """Of a run's rows, those of a variant or of the reference."""
    return [
        Range(**values)
        for row in results
        if row["variant"] == variant and row["part"] in EXPECTED_ORDER
        for values in row["layers"] or ()
    ]


def tail(values: Range) -> float | None:
    """The largest over the 99.9th percentile of the absolute values; None where that is 0."""
    return values.max_abs / values.p999 if values.p999 else None


def by_tail(ranges: Sequence[Range]) -> list[Range]:
    """By how far the largest value lies beyond the rest, descending; those without an answer are left out."""
    return sorted((each for each in ranges if tail(each)), key=lambda each: -(tail(each) or 0))


def furthest(ranges: Sequence[Range], group: str) -> list[Range]:
    """Of each layer the place whose values reach furthest in a group, by layer."""
    layers: dict[int, Range] = {}
    for each in ranges:
        if each.group == group and (each.layer not in layers or each.max_abs > layers[each.layer].max_abs):
            layers[each.layer] = each
    return [layers[layer] for layer in sorted(layers)]


def codes_left(values: Range, bits: int = 8) -> int | None:
    """How many codes of a grid around 0 that just holds the largest value are of use to 99.9 % of the values.

    Codes are round(x / step) with step = max / (2^(bits-1) - 1): those of -p999 to p999.
    """
    if not values.max_abs:
        return None
    return 2 * round(values.p999 / values.max_abs * (2 ** (bits - 1) - 1)) + 1
