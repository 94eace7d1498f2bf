"""Every query. Reads give plain data and frozen records, never rows that are bound to a session."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import Select, Table, delete, func, insert, select, update
from sqlalchemy.engine import CursorResult

from backend.errors import DatabaseError
from backend.metrics.stats import FINAL_STATUSES
from db.base import Base
from db.models import ChunkRow, KernelResultRow, QuantizationResultRow, RequestRow, RunRow, SampleRow, StepRow
from db.owner import Owner
from db.run_rows import Row, Run, RunKind, result_row, to_run
from db.run_search import matches
from db.step_queries import select_steps

if TYPE_CHECKING:
    from db.session import Database

INTERRUPTED_ERROR = "the process that ran it ended"

_NOT_FINAL = RunRow.status.not_in(FINAL_STATUSES)
# The ids of a prompt's samples differ in the number at their end.
_WORKLOAD_ORDER = (
    RequestRow.warmup.desc(),
    RequestRow.index,
    func.length(RequestRow.request_id),
    RequestRow.request_id,
)
_LONG_COLUMNS = ("row_id", "emission_times", "emission_tokens", "prompt", "text", "token_ids")
_TOKEN_COLUMNS = ("row_id", "request_id", "prompt", "token_ids", "num_prompt_tokens")
_OWNER_COLUMNS = [getattr(RunRow, f"owner_{field.name}") for field in fields(Owner)]


class RunRepository:
    """Runs and their records. Thread-safe; every method is one transaction and raises `DatabaseError`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # Runs

    def create(
        self,
        config: Mapping[str, Any],
        workload: Mapping[str, Any],
        label: str | None = None,
        notes: str | None = None,
        kind: RunKind = "serve",
    ) -> int:
        """Add a queued run that belongs to this process; returns its id.

        Args:
            config: `EngineConfig.to_dict()`, as asked; of a lab's run, the lab's config.
            workload: `Workload.to_dict()`; of a lab's run, empty.
        """
        owner = {f"owner_{name}": value for name, value in asdict(Owner.this_process()).items()}
        row = RunRow(
            kind=kind,
            status="queued",
            label=label or None,
            notes=notes or None,
            created_at=datetime.now(UTC),
            model=config["model"]["name"] if kind == "serve" else config.get("model", ""),
            config=config,
            workload=workload,
            notices=[],
            **owner,
        )
        with self._database.write() as session:
            session.add(row)
            session.flush()
            return row.run_id

    def get(self, run_id: int) -> Run | None:
        """The run, or None when there is none with this id."""
        with self._database.read() as session:
            row = session.get(RunRow, run_id)
            return None if row is None else to_run(row)

    def get_all(self, run_ids: Iterable[int]) -> list[Run]:
        """The runs in the order asked for. Raises `DatabaseError` naming one that does not exist."""
        runs = []
        for run_id in run_ids:
            run = self.get(run_id)
            if run is None:
                raise _unknown(run_id)
            runs.append(run)
        return runs

    def count(self) -> int:
        """How many runs are stored."""
        with self._database.read() as session:
            return session.scalar(select(func.count()).select_from(RunRow)) or 0

    def list(
        self,
        *,
        text: str | None = None,
        statuses: Collection[str] | None = None,
        models: Collection[str] | None = None,
        kind: RunKind | None = None,
        limit: int | None = 500,
    ) -> list[Run]:
        """Runs that meet every filter, newest first.

        Args:
            text: part of a label, of the notes or of a model's name, in any case; or a run id, as `12` or `#12`.
            statuses, models: any of these; None for all.
            kind: this one only; None for all.
            limit: most runs to return; None for all.
        """
        query = select(RunRow).order_by(RunRow.run_id.desc()).limit(limit)
        if text and text.strip():
            query = query.where(matches(text.strip()))
        if statuses is not None:
            query = query.where(RunRow.status.in_(statuses))
        if models is not None:
            query = query.where(RunRow.model.in_(models))
        if kind is not None:
            query = query.where(RunRow.kind == kind)
        with self._database.read() as session:
            return [to_run(row) for row in session.scalars(query)]

    def models(self) -> list[str]:
        """Names of the models that have runs, sorted."""
        with self._database.read() as session:
            query = select(RunRow.model).where(RunRow.model != "").distinct().order_by(RunRow.model)
            return list(session.scalars(query))

    def set_label(self, run_id: int, label: str | None) -> None:
        """Raises `DatabaseError` for an unknown run."""
        self._set(run_id, {"label": label or None})

    def set_notes(self, run_id: int, notes: str | None) -> None:
        """Raises `DatabaseError` for an unknown run."""
        self._set(run_id, {"notes": notes or None})

    def delete(self, run_ids: Iterable[int]) -> None:
        """Delete runs with all their records: every one of them, or none.

        Raises `DatabaseError` for an unknown run, and for one that is not over and whose process is not known to have ended.
        """
        wanted = set(run_ids)
        with self._database.write() as session:
            rows = session.scalars(select(RunRow).where(RunRow.run_id.in_(wanted)).order_by(RunRow.run_id)).all()
            if missing := sorted(wanted - {row.run_id for row in rows}):
                raise DatabaseError(f"there is no run {_names(missing)}; nothing was deleted")
            for run in map(to_run, rows):
                if not run.is_final and not run.owner.is_gone:
                    raise DatabaseError(
                        f"run #{run.run_id} is {run.status} (process {run.owner_pid} on {run.owner_host}); "
                        "cancel it first, nothing was deleted"
                    )
            session.execute(delete(RunRow).where(RunRow.run_id.in_(wanted)))

    def mark_interrupted(self) -> list[int]:
        """Mark the runs that are not over and whose process is known to have ended; returns their ids, in order."""
        with self._database.read() as session:
            query = select(RunRow.run_id, *_OWNER_COLUMNS).where(_NOT_FINAL).order_by(RunRow.run_id)
            rows = session.execute(query).all()
        orphans = [run_id for run_id, *owner in rows if Owner(*owner).is_gone]
        if not orphans:
            return []  # without taking the write lock
        change = {"status": "interrupted", "error": INTERRUPTED_ERROR, "phase": None}
        with self._database.write() as session:
            session.execute(update(RunRow).where(RunRow.run_id.in_(orphans), _NOT_FINAL).values(change))
        return orphans

    # Records

    def record(self, run_id: int, changes: Mapping[str, Any], rows: Mapping[type[Base], Sequence[Row]]) -> None:
        """Store what a recorder has gathered, in one transaction. Raises `DatabaseError` if the run was deleted.

        Args:
            changes: columns of the run; ignored once its status is final. "interrupted" is no end for the process that
                runs it: whoever marked it could not see that it lives.
            rows: record rows by table, as `db.run_rows` makes them.
        """
        with self._database.write() as session:
            query = select(RunRow.status, *_OWNER_COLUMNS).where(RunRow.run_id == run_id).with_for_update()
            row = session.execute(query).one_or_none()
            if row is None:
                raise DatabaseError(f"run #{run_id} was deleted while it ran")
            status, *owner = row
            wrongly_marked = status == "interrupted" and Owner(*owner).is_this_process
            for table, table_rows in rows.items():
                if table_rows:
                    session.execute(insert(cast(Table, table.__table__)), table_rows)
            if changes and (wrongly_marked or status not in FINAL_STATUSES):
                session.execute(update(RunRow).where(RunRow.run_id == run_id).values(dict(changes)))

    def requests(self, run_id: int) -> list[Row]:
        """The run's requests as dicts by column name: warm-up first, then in workload order, a prompt's samples in theirs."""
        return self._rows(_select_records(RequestRow, run_id).order_by(*_WORKLOAD_ORDER))

    def request_times(self, run_id: int) -> list[Row]:
        """As `requests`, without what grows with a request's tokens: prompt, text, ids and emissions."""
        columns = [column for column in RequestRow.__table__.columns if column.name not in _LONG_COLUMNS]
        query = select(*columns).where(RequestRow.run_id == run_id)
        return self._rows(query.order_by(*_WORKLOAD_ORDER))

    def request_tokens(self, run_id: int, after: int = 0) -> list[Row]:
        """What tells the tokens of the run's requests, from the one behind row `after` on, in the order of `row_id`."""
        columns = [column for column in RequestRow.__table__.columns if column.name in _TOKEN_COLUMNS]
        query = select(*columns).where(RequestRow.run_id == run_id, RequestRow.row_id > after)
        return self._rows(query.order_by(RequestRow.row_id))

    def emission_times(self, run_id: int, request_id: str) -> list[float]:
        """When a request's output was delivered, in seconds since the run's start; empty as long as it has not ended."""
        query = select(RequestRow.emission_times).where(
            RequestRow.run_id == run_id, RequestRow.request_id == request_id
        )
        with self._database.read() as session:
            return session.scalars(query).first() or []

    def step_times(self, run_id: int, from_step: int = 0) -> list[tuple[int, float, float]]:
        """(step, start, end) of the steps that were timed, in seconds since the run's start, in order."""
        query = (
            select(StepRow.step, StepRow.end_time - StepRow.duration_ms / 1e3, StepRow.end_time)
            .where(StepRow.run_id == run_id, StepRow.step >= from_step)
            .where(StepRow.end_time.is_not(None), StepRow.duration_ms.is_not(None))
            .order_by(StepRow.step)
        )
        with self._database.read() as session:
            rows: Sequence[Any] = session.execute(query).all()
            return [(step, start, end) for step, start, end in rows]

    def steps(self, run_id: int, max_points: int | None = None) -> list[Row]:
        """The run's steps as dicts by column name, in order; see `select_steps` for `max_points` and added columns."""
        with self._database.read() as session:
            query = select_steps(session, run_id, max_points)
            return [dict(row) for row in session.execute(query).mappings()]

    def samples(self, run_id: int) -> list[Row]:
        """The run's telemetry samples as dicts by column name, in order."""
        return self._rows(_select_records(SampleRow, run_id).order_by(SampleRow.time))

    def add_kernel_result(self, run_id: int, result: Mapping[str, Any]) -> None:
        """Store one result of a kernel run that goes on; see `result_row`."""
        self.record(run_id, {}, {KernelResultRow: [result_row(KernelResultRow, run_id, result)]})

    def kernel_results(self, run_id: int) -> list[Row]:
        """The run's kernel results as dicts by column name, in the order they were measured."""
        return self._rows(_select_records(KernelResultRow, run_id).order_by(KernelResultRow.row_id))

    def add_quantization_result(self, run_id: int, result: Mapping[str, Any]) -> None:
        """Store one result of a quantization run that goes on; see `result_row`."""
        self.record(run_id, {}, {QuantizationResultRow: [result_row(QuantizationResultRow, run_id, result)]})

    def quantization_results(self, run_id: int) -> list[Row]:
        """The run's variants as dicts by column name, in the order they were measured."""
        return self._rows(_select_records(QuantizationResultRow, run_id).order_by(QuantizationResultRow.row_id))

    def chunks(self, run_id: int, kind: str, from_step: int = 0) -> list[tuple[bytes, int, int]]:
        """The run's ledger chunks of one kind as (data, first step, last step), in order.

        Args:
            from_step: leave out chunks whose steps all come before it.
        """
        query = (
            select(ChunkRow.data, ChunkRow.first_step, ChunkRow.last_step)
            .where(ChunkRow.run_id == run_id, ChunkRow.kind == kind, ChunkRow.last_step >= from_step)
            .order_by(ChunkRow.first_step)
        )
        with self._database.read() as session:
            return [(data, first, last) for data, first, last in session.execute(query)]

    def _set(self, run_id: int, values: Row) -> None:
        with self._database.write() as session:
            result = session.execute(update(RunRow).where(RunRow.run_id == run_id).values(values))
            if isinstance(result, CursorResult) and result.rowcount == 0:
                raise _unknown(run_id)

    def _rows(self, query: Select[Any]) -> list[Row]:
        with self._database.read() as session:
            return [dict(row) for row in session.execute(query).mappings()]


def _select_records(
    table: type[RequestRow | SampleRow | KernelResultRow | QuantizationResultRow], run_id: int
) -> Select[Any]:
    columns = [column for column in table.__table__.columns if column.name != "row_id"]
    return select(*columns).where(table.run_id == run_id)


def _unknown(run_id: int) -> DatabaseError:
    return DatabaseError(f"there is no run #{run_id}; `servelab runs list` shows the runs there are")


def _names(run_ids: Iterable[int]) -> str:
    return ", ".join(f"#{run_id}" for run_id in run_ids)
