"""From records to rows and back: the shape of what is stored, apart from the queries that store it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from operator import attrgetter
from typing import Any, Literal

from backend.metrics import stats
from backend.metrics.stats import FINAL_STATUSES, RequestStats, RunStatus, StepStats, TelemetrySample
from db.base import Base
from db.models import KernelResultRow, QuantizationResultRow, RequestRow, RunRow, SampleRow, StepRow
from db.owner import Owner

_TIME_DIGITS = 9  # the clock's own resolution; a difference of two readings carries noise below it

Row = dict[str, Any]
RunKind = Literal["serve", "kernels", "quantization", "certificate"]  # a workload on an engine, or a lab


@dataclass(frozen=True, slots=True)
class Run:
    """A stored run. `config` is as asked, `resolved_config` as run; what is not known (yet) is None.

    A run of a lab has an empty `workload` and a lab's config; that of the kernel lab also an empty `model`.
    """

    run_id: int
    kind: RunKind
    status: RunStatus
    phase: dict[str, Any] | None  # the fields of a `Phase` while it is not over
    label: str | None
    notes: str | None
    created_at: datetime  # aware, UTC, as the two below
    started_at: datetime | None
    ended_at: datetime | None  # None for an interrupted run: nobody saw it end
    model: str
    config: dict[str, Any]
    resolved_config: dict[str, Any] | None
    workload: dict[str, Any]
    environment: dict[str, Any] | None
    load: dict[str, Any] | None
    notices: list[str]
    cache_state: dict[str, Any] | None
    summary: dict[str, Any] | None
    error: str | None
    num_requests: int | None
    owner_host: str
    owner_boot_id: str | None
    owner_pid_namespace: int | None
    owner_pid: int
    owner_start_ticks: int | None
    owner_started: float  # seconds since the epoch

    @property
    def is_final(self) -> bool:
        return self.status in FINAL_STATUSES

    @property
    def owner(self) -> Owner:
        return Owner(
            host=self.owner_host,
            boot_id=self.owner_boot_id,
            pid_namespace=self.owner_pid_namespace,
            pid=self.owner_pid,
            start_ticks=self.owner_start_ticks,
            started=self.owner_started,
        )

    @property
    def title(self) -> str:
        """As people name it: `#12`, with its label when it has one."""
        return f"#{self.run_id} {self.label}" if self.label else f"#{self.run_id}"


def to_run(row: RunRow) -> Run:
    return Run(**{field.name: getattr(row, field.name) for field in fields(Run)})


def step_row(run_id: int, step: StepStats, start_time: float) -> Row:
    row = dict(zip(_STEP_FIELDS, _step_values(step), strict=True))
    row["run_id"] = run_id
    row["end_time"] = _relative(step.end_time, start_time)
    return row


def request_row(run_id: int, request: RequestStats, start_time: float) -> Row:
    import numpy as np  # here, so that commands which only list runs start without it

    row = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    row |= {name: formula(request) for name, formula in _LATENCIES.items()}
    row |= {name: _relative(row[name], start_time) for name in ("arrival_time", "scheduled_time", "finish_time")}
    emission_times = np.asarray(request.emission_times, dtype=np.float64) - start_time
    row["emission_times"] = array("d", emission_times.round(_TIME_DIGITS).tobytes())
    row["run_id"] = run_id
    return row


def sample_row(run_id: int, sample: TelemetrySample, start_time: float) -> Row:
    row = {name: getattr(sample, name) for name in _SAMPLE_FIELDS}
    row["run_id"] = run_id
    row["time"] = _relative(sample.time, start_time)
    return row


def chunk_row(run_id: int, kind: str, data: bytes, first_step: int, last_step: int) -> Row:
    return {"run_id": run_id, "kind": kind, "data": data, "first_step": first_step, "last_step": last_step}


def result_row(table: type[KernelResultRow | QuantizationResultRow], run_id: int, result: Mapping[str, Any]) -> Row:
    """A lab's result as a row of its table.

    Args:
        result: values by column name; what has no column is left out.
    """
    names = (column.name for column in table.__table__.columns if column.name not in ("row_id", "run_id"))
    return {name: result.get(name) for name in names} | {"run_id": run_id}


_LATENCIES: dict[str, Callable[[RequestStats], float | None]] = {
    "queue_ms": stats.queue_ms,
    "prefill_ms": stats.prefill_ms,
    "ttft_ms": stats.ttft_ms,
    "tpot_ms": stats.tpot_ms,
    "e2el_ms": stats.e2el_ms,
}


def _stored_fields(record: type, row: type[Base]) -> tuple[str, ...]:
    """Fields of a record that have a column; a new one without a migration must not cost a run its rows."""
    return tuple(field.name for field in fields(record) if field.name in row.__table__.columns)


_STEP_FIELDS = _stored_fields(StepStats, StepRow)
_step_values = attrgetter(*_STEP_FIELDS)  # quicker than one by one: a run has thousands of steps
_REQUEST_FIELDS = _stored_fields(RequestStats, RequestRow)
_SAMPLE_FIELDS = _stored_fields(TelemetrySample, SampleRow)


def _relative(time: float | None, start_time: float) -> float | None:
    return None if time is None else round(time - start_time, _TIME_DIGITS)
