"""`Figure`: one measured number, its samples, and what it is held against. Plain data, without torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Unit = Literal["tok/s", "s", "us", "share"]
Limit = Literal["copy", "matmul"]


@dataclass(frozen=True, slots=True)
class Spread:
    samples: Sequence[float]
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(samples, statistics.median(samples), min(samples), max(samples))


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that could not be measured has None for all numbers, and `error` says why.

    Attributes:
        model: or the shape, where no model runs.
        peer: what the figure is held against, of `peer_name`, in the same unit.
        ratio: how many times as good as the peer's: ours / theirs for rates, theirs / ours for times.
        share: of the limit named in `limit`, by the median.
        peer_share: of the same limit, what the peer's figure is.
        not_recorded: the same measurement without sinks, where there is one.
        details: further numbers by name.
    """

    model: str
    name: str
    unit: Unit
    samples: Sequence[float] | None = None
    median: float | None = None
    min: float | None = None
    max: float | None = None
    not_recorded: Spread | None = None
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    share: float | None = None
    limit: Limit | None = None
    peer_share: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @classmethod
    def of(
        cls,
        model: str,
        name: str,
        unit: Unit,
        samples: Sequence[float],
        *,
        not_recorded: Sequence[float] = (),
        peer: float | None = None,
        peer_name: str | None = None,
        share: float | None = None,
        limit: Limit | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> Figure:
        spread = Spread.of(samples)
        ratio = None
        if peer is not None:
            ratio = spread.median / peer if unit == "tok/s" else peer / spread.median
        return cls(
            model,
            name,
            unit,
            samples=spread.samples,
            median=spread.median,
            min=spread.min,
            max=spread.max,
            not_recorded=Spread.of(not_recorded) if not_recorded else None,
            peer=peer,
            peer_name=peer_name if peer is not None else None,
            ratio=ratio,
            share=share,
            limit=limit,
            peer_share=peer_share(share, ratio),
            details=details or {},
        )


def peer_share(share: float | None, ratio: float | None) -> float | None:
    """Of the limit that `share` is of, the peer's: it moves and computes the same in `ratio` times our time."""
    return share / ratio if share is not None and ratio else None


def attempt(model: str, name: str, unit: Unit, measure: Callable[[], Figure]) -> Figure:
    """The figure that `measure` gives; one that says why where it raises."""
    try:
        return measure()
    except Exception as error:
        return Figure(model, name, unit, error=f"{type(error).__name__}: {error}")
