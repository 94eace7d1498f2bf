"""What one transaction of a recorder stores, built from the records of a run in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta

from backend.metrics.stats import (
    Phase,
    RequestStats,
    RunEnd,
    RunStart,
    RunStatus,
    StepStats,
    TelemetrySample,
    summary_to_dict,
)
from db.base import Base
from db.models import ChunkRow, RequestRow, SampleRow, StepRow
from db.run_rows import Row, chunk_row, request_row, sample_row, step_row


@dataclass(frozen=True, slots=True)
class Chunk:
    """The arguments of `StatsSink.on_chunk`."""

    kind: str
    encode: Callable[[], bytes]
    first_step: int
    last_step: int


Record = RunStart | Phase | StepStats | RequestStats | TelemetrySample | Chunk | RunEnd

_STATUS_OF_PHASE: dict[str, RunStatus] = {
    "pulling": "loading",
    "loading": "loading",
    "warming up": "running",
    "running": "running",
    "writing": "running",
}
_STATUS_ORDER: Sequence[RunStatus] = ("queued", "loading", "running")


@dataclass(slots=True)
class Batch:
    """Columns of the run's own row to change, and rows to add by table."""

    changes: Row = field(default_factory=dict)
    rows: dict[type[Base], list[Row]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.changes or self.rows)

    def add(self, table: type[Base], row: Row) -> None:
        self.rows.setdefault(table, []).append(row)


class BatchBuilder:
    """Knows what the rows of one run need to know of it: its zero of time and how far it has come."""

    def __init__(self, run_id: int) -> None:
        self.ended = False
        self._run_id = run_id
        self._created = time.perf_counter()
        self._start_time: float | None = None
        self._started_at: datetime | None = None
        self._early: list[Record] = []  # records from before the start, whose relative times are not known yet
        self._status: RunStatus = "queued"
        self._notices: list[str] = []

    def add(self, batch: Batch, record: Record) -> None:
        """Add what `record` means for the database."""
        match record:
            case Phase():
                self._advance(_STATUS_OF_PHASE.get(record.name, self._status))
                batch.changes |= self._state() | {"phase": asdict(record)}
            case Chunk(kind, encode, first_step, last_step):
                batch.add(ChunkRow, chunk_row(self._run_id, kind, encode(), first_step, last_step))
            case RunStart():
                self._begin(batch, record)
            case RunEnd():
                self._end(batch, record)
            case _ if self._start_time is None:
                self._early.append(record)
            case StepStats():
                batch.add(StepRow, step_row(self._run_id, record, self._start_time))
            case RequestStats():
                batch.add(RequestRow, request_row(self._run_id, record, self._start_time))
            case TelemetrySample():
                batch.add(SampleRow, sample_row(self._run_id, record, self._start_time))

    def add_notice(self, batch: Batch, notice: str) -> None:
        """Add a sentence to the run's notices, after the engine's."""
        self._notices = [*self._notices, notice]
        batch.changes["notices"] = self._notices

    def _begin(self, batch: Batch, start: RunStart) -> None:
        self._started_at = _wall_time(start.start_time)
        self._notices = [*start.notices, *self._notices]
        self._advance("running")
        batch.changes |= self._state()
        batch.changes |= {
            "started_at": self._started_at,
            "resolved_config": start.resolved_config,
            "environment": start.environment,
            "load": start.load,
            "notices": self._notices,
            "cache_state": start.cache_state,
            "num_requests": start.num_requests,
        }
        self._add_early(batch, start.start_time)

    def _end(self, batch: Batch, end: RunEnd) -> None:
        if self._started_at is None or self._start_time is None:
            ended_at = _wall_time(end.end_time)
            self._add_early(batch, self._created)
        else:  # by the run's own clock: setting the wall clock meanwhile does not change the duration
            ended_at = self._started_at + timedelta(seconds=end.end_time - self._start_time)
        batch.changes |= {
            "status": end.status,
            "phase": None,
            "ended_at": ended_at,
            "error": end.error,
            "summary": None if end.summary is None else summary_to_dict(end.summary),
        }
        self.ended = True

    def _add_early(self, batch: Batch, start_time: float) -> None:
        self._start_time = start_time
        for record in self._early:
            self.add(batch, record)
        self._early.clear()

    def _state(self) -> Row:
        """Said anew each time: somebody may have marked the run interrupted who could not see that it goes on."""
        return {"status": self._status, "error": None}

    def _advance(self, status: RunStatus) -> None:
        """Go on to `status`, unless the run has been there: it never goes back."""
        if _STATUS_ORDER.index(status) > _STATUS_ORDER.index(self._status):
            self._status = status


def _wall_time(clock: float) -> datetime:
    """The wall time of a reading of `time.perf_counter()`."""
    return datetime.now(UTC) - timedelta(seconds=time.perf_counter() - clock)
