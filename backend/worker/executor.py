"""`Executor`: where a step is carried out. In process today; ranks on several devices would come in here."""

from __future__ import annotations

from typing import Protocol

from backend.core.output import PendingOutput, SchedulerOutput
from backend.metrics.stats import MemoryUse
from backend.worker.model_runner import ModelRunner


class Executor(Protocol):
    def submit(self, scheduled: SchedulerOutput) -> PendingOutput:
        """Start a step, or carry it out. Steps run in this order; results are asked for in it, one for each step."""
        ...

    def memory(self) -> MemoryUse: ...
    def reset_peak(self) -> None: ...
    def shutdown(self) -> None: ...


class InProcessExecutor:
    """Runs every step on the calling thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, scheduled: SchedulerOutput) -> PendingOutput:
        return self._runner.submit(scheduled)

    def memory(self) -> MemoryUse:
        return self._runner.memory()

    def reset_peak(self) -> None:
        self._runner.reset_peak()

    def shutdown(self) -> None:
        self._runner.shutdown()
