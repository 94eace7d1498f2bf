"""Time series of a running run, thinned as it grows: at most 300 points however long it lasts."""

from __future__ import annotations

from dataclasses import dataclass

from backend.metrics.stats import StepStats

MAX_POINTS = 300
FIRST_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class LivePoint:
    """One interval: rates are its means, gauges stand as after its last step."""

    time_s: float  # end of the interval, since the run's start
    output_tok_s: float
    input_tok_s: float
    running: int
    waiting: int
    kv_cache_usage: float  # 0..1


class LiveSeries:
    """Sums steps into intervals of equal length; when 300 are full, neighbours merge and the interval doubles.

    An interval without steps has rates of 0 and the gauges before it, so a stall shows.
    """

    def __init__(self) -> None:
        self._interval = FIRST_INTERVAL_S
        self._points: list[LivePoint] = []
        self._view: tuple[LivePoint, ...] | None = ()
        self._output_tokens = self._input_tokens = 0
        self._gauges = (0, 0, 0.0)

    def add(self, stats: StepStats, end_s: float) -> None:
        """Count a step that ended `end_s` seconds after the run's start."""
        self.advance(end_s)
        self._output_tokens += stats.num_output_tokens
        self._input_tokens += stats.num_prefill_tokens
        self._gauges = (stats.num_running, stats.num_waiting, stats.kv_cache_usage)

    def advance(self, now_s: float) -> None:
        """Close the intervals that ended by `now_s`."""
        while now_s >= (len(self._points) + 1) * self._interval:
            running, waiting, usage = self._gauges
            self._points.append(
                LivePoint(
                    time_s=(len(self._points) + 1) * self._interval,
                    output_tok_s=self._output_tokens / self._interval,
                    input_tok_s=self._input_tokens / self._interval,
                    running=running,
                    waiting=waiting,
                    kv_cache_usage=usage,
                )
            )
            self._output_tokens = self._input_tokens = 0
            self._view = None
            if len(self._points) == MAX_POINTS:
                pairs = zip(self._points[::2], self._points[1::2], strict=True)
                self._points = [_merge(first, second) for first, second in pairs]
                self._interval *= 2

    def points(self) -> tuple[LivePoint, ...]:
        if self._view is None:
            self._view = tuple(self._points)
        return self._view


def _merge(first: LivePoint, second: LivePoint) -> LivePoint:
    return LivePoint(
        time_s=second.time_s,
        output_tok_s=(first.output_tok_s + second.output_tok_s) / 2,
        input_tok_s=(first.input_tok_s + second.input_tok_s) / 2,
        running=second.running,
        waiting=second.waiting,
        kv_cache_usage=second.kv_cache_usage,
    )
