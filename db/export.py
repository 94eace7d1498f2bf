"""Runs as one JSON document or one CSV table, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal

from db.base import plain_data
from db.models import KernelResultRow, QuantizationResultRow, RequestRow, StepRow
from db.repository import RunRepository
from db.run_rows import Row, Run

Format = Literal["json", "csv"]
Table = Literal["requests", "steps", "rounds", "runs", "kernels", "quantization"]
SYNTHETIC = "synthetic"  # the key, or column, that marks a run

# A round of drafts. `warmup` is null while its request has not ended; `draft_probs` is 1 where the proposer drafts without a
# draw; `token_id` stands behind the accepted tokens, by `origin` "recovered" or "bonus", and was delivered where `num_emitted`
# is above `num_accepted`; `num_nodes` is null for a chain; the times are of all rounds of the step.
ROUND_COLUMNS = (
    "run_id",
    "step",
    "request_id",
    "warmup",
    "position",
    "draft_token_ids",
    "draft_probs",
    "target_probs",
    "accept_probs",
    "num_accepted",
    "rejected_token_id",
    "token_id",
    "origin",
    "num_emitted",
    "num_nodes",
    "draft_ms",
    "verify_ms",
)

# A spreadsheet takes a cell that begins so for a formula; tab and line ends are skipped before it looks.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")


def export_runs(
    repository: RunRepository,
    run_ids: Sequence[int],
    format: Format,
    table: Table | None = None,
    *,
    verdicts: Mapping[int, Row] | None = None,
    synthetic: Collection[int] = (),
    rounds: Callable[[int], Iterable[Row]] = lambda run_id: (),
) -> bytes:
    """Export runs, in the order asked for, as UTF-8.

    Args:
        format: `json` is one list; `csv` is one table with a header: when none is named `requests`, or the results of a
            lab where all runs are its own.
        table: `requests`, `steps`, `rounds`, `kernels` and `quantization` give those rows with their `run_id`, `runs` one
            flat row per run with dotted names (`config.cache.block_size`, `summary.ttft_ms.p50`). None in JSON gives each
            run whole, its requests and steps, or its lab's results, in it.
        verdicts: of certificates by run id, a `verdict` of theirs where runs are given whole or as `runs`.
        synthetic: runs whose drafts were accepted at a set rate, so that their tokens mean nothing. In JSON they, or their
            rows, have `synthetic` true, and others no such key; in CSV it is a column.
        rounds: gives the rounds of a run, as rows of `ROUND_COLUMNS`.

    JSON has null, CSV an empty cell for what does not exist. Lists are JSON text in CSV cells. Numbers are written so that
    they read back equal; text that a spreadsheet would run is prefixed (see `spreadsheet_safe`). Raises `DatabaseError` for
    an unknown run.
    """
    runs = repository.get_all(run_ids)
    source = _Source(repository, verdicts or {}, synthetic, rounds)
    if format == "json":
        document = [source.whole(run) for run in runs] if table is None else list(source.rows(runs, table))
        # Lone surrogates become \\udXXX, which is how JSON itself spells them.
        return (json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1) + "\n").encode(
            "utf-8", "backslashreplace"
        )
    table = table or _table_of(runs)
    rows = source.rows(runs, table)
    if table == "runs":
        rows = list(rows)
        header = _union_of_keys(rows)
    else:
        header = _COLUMNS[table]
    if table not in _LABS:
        header = [*(name for name in header if name != SYNTHETIC), SYNTHETIC]
    return _to_csv(header, ({SYNTHETIC: False} | row for row in rows))


def spreadsheet_safe(text: str) -> str:
    """`text` with a `'` before it if a spreadsheet would run it as a formula.

    That is text which begins with `=`, `+`, `-`, `@` (full-width forms too), tab, CR or LF, or with any of these after one or
    more `'`. So the text comes back by removing one `'` from cells that match `^'+[=+\\-@...]`.
    """
    return f"'{text}" if _FORMULA.match(text) else text


def _table_of(runs: Sequence[Run]) -> Table:
    kinds = {run.kind for run in runs}
    for kind in _LABS:
        if kinds == {kind}:
            return kind
    return "requests"


@dataclass(frozen=True, slots=True)
class _Source:
    """Where rows come from; for the fields see `export_runs`."""

    repository: RunRepository
    verdicts: Mapping[int, Row]
    synthetic: Collection[int]
    rounds: Callable[[int], Iterable[Row]]

    def rows(self, runs: Iterable[Run], table: Table) -> Iterator[Row]:
        """One after the other, as a run may have a million rounds."""
        for run in runs:
            mark = self._mark(run)
            for row in self._rows_of(run, table):
                yield row | mark

    def whole(self, run: Run) -> Row:
        whole = self._run_fields(run) | self._mark(run)
        tables = (run.kind,) if run.kind in _LABS else ("requests", "steps")
        return whole | {table: list(self._rows_of(run, table)) for table in tables}

    def _mark(self, run: Run) -> Row:
        return {SYNTHETIC: True} if run.run_id in self.synthetic else {}

    def _rows_of(self, run: Run, table: Table) -> Iterable[Row]:
        match table:
            case "requests":
                return self.repository.requests(run.run_id)
            case "steps":
                return self.repository.steps(run.run_id)
            case "rounds":
                return self.rounds(run.run_id)
            case "kernels":
                return self.repository.kernel_results(run.run_id)
            case "quantization":
                return self.repository.quantization_results(run.run_id)
            case "runs":
                return [dict(_flatten(self._run_fields(run)))]

    def _run_fields(self, run: Run) -> Row:
        values = {field.name: getattr(run, field.name) for field in fields(Run)}
        if run.run_id in self.verdicts:
            values["verdict"] = self.verdicts[run.run_id]
        return {
            name: value.isoformat() if isinstance(value, datetime) else plain_data(value)
            for name, value in values.items()
        }


def _flatten(table: Row, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _union_of_keys(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row)) or ["run_id"]


def _to_csv(header: Sequence[str], rows: Iterable[Row]) -> bytes:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow([spreadsheet_safe(name) for name in header])
    writer.writerows([_cell(row.get(name)) for name in header] for row in rows)
    return buffer.getvalue().encode("utf-8", "backslashreplace")


def _cell(value: Any) -> Any:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return spreadsheet_safe(value)
        case list() | dict():
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return value  # numbers, which csv writes by repr, and None, which it leaves empty


def _columns(table: type[RequestRow | StepRow | KernelResultRow | QuantizationResultRow]) -> list[str]:
    return [column.name for column in table.__table__.columns if column.name != "row_id"]


_LABS: tuple[Literal["kernels", "quantization"], ...] = ("kernels", "quantization")  # run kinds, as their tables
_COLUMNS: dict[Table, Sequence[str]] = {
    "requests": _columns(RequestRow),
    "steps": [*_columns(StepRow), "num_steps", "kv_cache_usage"],
    "rounds": ROUND_COLUMNS,
    "kernels": _columns(KernelResultRow),
    "quantization": _columns(QuantizationResultRow),
}
