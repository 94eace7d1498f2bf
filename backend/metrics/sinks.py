"""Sinks that every run has: one that hands on to several, and one that keeps the peaks for the summary."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from backend.metrics.stats import (
    Phase,
    RequestStats,
    RunEnd,
    RunStart,
    StatsSink,
    StepStats,
    TelemetrySample,
)
from backend.metrics.summary import SwapTotals

logger = logging.getLogger(__name__)


class SinkGroup:
    """Hands every record to all its sinks, in their order. A sink that raises is logged and never stops a run.

    `on_run_end` reaches each sink once, whoever calls it how often.
    """

    def __init__(self, sinks: Sequence[StatsSink]) -> None:
        self._sinks = tuple(sinks)
        self._lock = threading.Lock()
        self._ended = False
        self._logged: set[tuple[int, str]] = set()

    def on_run_start(self, start: RunStart) -> None:
        self._each("on_run_start", start)

    def on_phase(self, phase: Phase) -> None:
        self._each("on_phase", phase)

    def on_step(self, stats: StepStats) -> None:
        self._each("on_step", stats)

    def on_request_finished(self, stats: RequestStats) -> None:
        self._each("on_request_finished", stats)

    def on_chunk(self, kind: str, encode: Callable[[], bytes], first_step: int, last_step: int) -> None:
        self._each("on_chunk", kind, encode, first_step, last_step)

    def on_sample(self, sample: TelemetrySample) -> None:
        self._each("on_sample", sample)

    def on_run_end(self, end: RunEnd) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._each("on_run_end", end)

    def _each(self, name: str, *record: object) -> None:
        for index, sink in enumerate(self._sinks):
            try:
                getattr(sink, name)(*record)
            except Exception:
                if (index, name) not in self._logged:  # once: a broken sink fails at every step
                    self._logged.add((index, name))
                    logger.exception("%s failed in %s; the run goes on", type(sink).__name__, name)


class PeakSink:
    """The most KV cache used and what was swapped in the measured part, and the most memory in the whole run."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._measured_from: float | None = None
        self.kv_cache_usage: float | None = None  # 0..1
        self.swapped = SwapTotals()
        self.memory_bytes: int | None = None

    def on_phase(self, phase: Phase) -> None:
        if phase.name == "running" and self._measured_from is None:
            self._measured_from = self._clock()

    def on_step(self, stats: StepStats) -> None:
        if self._measured_from is not None and stats.start_time >= self._measured_from:
            self.kv_cache_usage = max(self.kv_cache_usage or 0.0, stats.kv_cache_usage)
            self.swapped.add(stats)

    def on_sample(self, sample: TelemetrySample) -> None:
        device = sample.device_memory_bytes
        self.add_memory(sample.host_memory_bytes if device is None else device)

    def add_memory(self, num_bytes: int | None) -> None:
        """Count a peak that was measured elsewhere."""
        if num_bytes is not None:
            self.memory_bytes = max(self.memory_bytes or 0, num_bytes)

    def on_run_start(self, start: RunStart) -> None:
        """Holds no peak."""

    def on_request_finished(self, stats: RequestStats) -> None:
        """Holds no peak."""

    def on_chunk(self, kind: str, encode: Callable[[], bytes], first_step: int, last_step: int) -> None:
        """Holds no peak."""

    def on_run_end(self, end: RunEnd) -> None:
        """Holds no peak."""
