"""What a `RunQueue` works on: jobs, and what it needs of the engine's host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.experiments.flight import Flight
from backend.metrics.live import LiveRun
from backend.metrics.sinks import PeakSink, SinkGroup
from backend.metrics.stats import MemoryUse, Phase, RunEnd, StatsSink
from backend.workload.spec import Workload


class LoadedInfo(Protocol):
    """What a run stores about the loaded engine."""

    @property
    def resolved_config(self) -> EngineConfig: ...
    @property
    def model(self) -> Mapping[str, Any]: ...
    @property
    def load(self) -> Mapping[str, Any]: ...
    @property
    def notices(self) -> tuple[str, ...]: ...


class RunHost(Protocol):
    """What the queue needs of `EngineHost`."""

    @property
    def state(self) -> str: ...
    def load(self, config: EngineConfig, on_phase: Callable[[Phase], None]) -> LoadedInfo: ...
    def set_sink(self, sink: StatsSink | None) -> None: ...
    def memory(self) -> MemoryUse: ...
    def reset_peak_memory(self) -> None: ...
    def reset_prefix_cache(self) -> int: ...
    def num_cached_tokens(self) -> int: ...
    def unload(self) -> None: ...
    def execute(self, function: Callable[[], RunEnd]) -> RunEnd: ...


class Task(Protocol):
    """What a run does that sends no workload to the engine, such as the kernel lab's."""

    def __call__(self, sink: StatsSink, cancel: threading.Event) -> RunEnd:
        """Do all of it, telling `sink` everything but the end; return soon after `cancel` is set.

        It is called on the thread that owns the device, with no engine loaded.
        """
        ...


@dataclass(eq=False)
class Job:
    run_id: int
    live: LiveRun
    sinks: SinkGroup
    cancel: threading.Event = field(default_factory=threading.Event, kw_only=True)


@dataclass(eq=False)
class TaskJob(Job):
    task: Task


@dataclass(eq=False)
class WorkloadJob(Job):
    config: EngineConfig
    workload: Workload
    in_flight: dict[str, Flight]
    peaks: PeakSink
    problem: ConfigError | None  # found when it was submitted; it ends the run as soon as that is taken up
