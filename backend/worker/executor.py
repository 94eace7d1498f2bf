"""`Executor`: where a step is carried out. In process today; ranks on several devices would come in here."""

from __future__ import annotations

from typing import Protocol

from backend.core.output import ModelRunnerOutput, SchedulerOutput
from backend.metrics.stats import MemoryUse
from backend.worker.model_runner import ModelRunner


class Executor(Protocol):
    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput: ...
    def memory(self) -> MemoryUse: ...
    def reset_peak(self) -> None: ...
    def shutdown(self) -> None: ...


class InProcessExecutor:
    """Runs every step on the calling thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        return self._runner.execute_model(scheduled)

    def memory(self) -> MemoryUse:
        return self._runner.memory()

    def reset_peak(self) -> None:
        self._runner.reset_peak()

    def shutdown(self) -> None:
        self._runner.shutdown()
