"""A clock that only calls move, and benchmarks whose limits are known."""

from __future__ import annotations

import pytest
import torch

import kernels.benchmark as benchmark
from kernels.limits import Limits

CPU = torch.device("cpu")
FAST = Limits("a card", "float32", 2**20, 1e15, 1e18)  # faster than anything that is timed here


class Clock:
    """In place of the modules' `time`: it goes on only by what a call is told to take, and by `tick` at each reading."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now

    def time(self) -> float:
        return 1e9 - 3600 * self.now  # as if it were set back again and again

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def bench(monkeypatch: pytest.MonkeyPatch, measured: Limits, later: Limits | None = None) -> benchmark.Benchmark:
    """A benchmark that measures these limits, first and again."""
    answers = iter([measured, later or measured])
    monkeypatch.setattr(benchmark, "measure_limits", lambda device, dtype: next(answers))
    return benchmark.Benchmark(CPU, torch.float32)
