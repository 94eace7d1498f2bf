"""CUDA graphs on and off: two ordinary runs that differ in `kernels.enforce_eager`, and what their steps cost the host.

A decode step of a small model launches hundreds of kernels that take microseconds each; launched one by one they wait for
the host. A graph launches all of them at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from backend.config import EngineConfig
from backend.workload.spec import SyntheticSource, Workload

DEFAULT_MODEL = "dummy:smollm2-135m"
NUM_REQUESTS = 8
_PROMPT_LEN, _OUTPUT_LEN = 32, 256
LABELS = {False: "CUDA graphs on", True: "CUDA graphs off"}  # by enforce_eager


class GraphRun(Protocol):
    """What is read of a stored run."""

    @property
    def run_id(self) -> int: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def resolved_config(self) -> Mapping[str, Any] | None: ...
    @property
    def workload(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Medians over a run's steps that only decode, in ms."""

    duration_ms: float
    host_ms: float  # scheduling and taking the result in: schedule + process
    execute_ms: float
    num_steps: int


def graph_settings(model: str = DEFAULT_MODEL) -> tuple[dict[bool, EngineConfig], Workload]:
    """Two configs by `enforce_eager`, and the workload for both: a few requests that decode together."""
    config = EngineConfig().with_overrides({"model.name": model})
    configs = {eager: config.with_overrides({"kernels.enforce_eager": eager}) for eager in (False, True)}
    source = SyntheticSource(num_requests=NUM_REQUESTS, prompt_len=_PROMPT_LEN)
    return configs, Workload(source=source, output_len=_OUTPUT_LEN)


def newest_pair(runs: Iterable[GraphRun]) -> tuple[int, int] | None:
    """Ids of the newest two runs, (graphs on, graphs off), that are otherwise the same.

    Args:
        runs: finished ones, newest first.
    """
    seen: list[tuple[bool, dict[str, Any], Mapping[str, Any], int]] = []
    for run in runs:
        eager = (run.resolved_config or {}).get("kernels", {}).get("enforce_eager")
        if eager is None:
            continue
        # As asked: what was resolved differs in more, since graphs take memory that the KV cache then has not.
        rest = {**run.config, "kernels": {**run.config["kernels"], "enforce_eager": None}}
        for other_eager, other_rest, workload, run_id in seen:
            if eager != other_eager and rest == other_rest and run.workload == workload:
                return (run_id, run.run_id) if eager else (run.run_id, run_id)
        seen.append((eager, rest, run.workload, run.run_id))
    return None


def decode_step(steps: Sequence[Mapping[str, Any]]) -> DecodeStep | None:
    """The typical step that only decodes; None without one. The first is left out: it may have captured the graph."""
    decoding = [row for row in steps if row["num_decode_tokens"] and not row["num_prefill_tokens"]][1:]
    if not decoding:
        return None
    return DecodeStep(
        duration_ms=statistics.median(row["duration_ms"] for row in decoding),
        host_ms=statistics.median(row["schedule_ms"] + row["process_ms"] for row in decoding),
        execute_ms=statistics.median(row["execute_ms"] for row in decoding),
        num_steps=len(decoding),
    )
