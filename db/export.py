"""Runs as one JSON document or one CSV table, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any, Literal

from db.base import plain_data
from db.models import KernelResultRow, QuantizationResultRow, RequestRow, StepRow
from db.repository import RunRepository
from db.run_rows import Row, Run

Format = Literal["json", "csv"]
Table = Literal["requests", "steps", "runs", "kernels", "quantization"]


# A spreadsheet takes a cell that begins so for a formula; tab and line ends are skipped before it looks.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")


def export_runs(
    repository: RunRepository,
    run_ids: Sequence[int],
    format: Format,
    table: Table | None = None,
    verdicts: Mapping[int, Row] | None = None,
) -> bytes:
    """Export runs, in the order asked for, as UTF-8.

    Args:
        format: `json` is one list; `csv` is one table with a header: when none is named `requests`, or the results of a
            lab where all runs are its own.
        table: `requests`, `steps`, `kernels` and `quantization` give those rows with their `run_id`, `runs` one flat row
            per run with dotted names (`config.cache.block_size`, `summary.ttft_ms.p50`). None in JSON gives each run
            whole, its requests and steps, or its lab's results, in it.
        verdicts: of certificates by run id, a `verdict` of theirs where runs are given whole or as `runs`.

    JSON has null, CSV an empty cell for what does not exist. Lists are JSON text in CSV cells. Numbers are written so that
    they read back equal; text that a spreadsheet would run is prefixed (see `spreadsheet_safe`). Raises `DatabaseError` for
    an unknown run.
    """
    runs = repository.get_all(run_ids)
    verdicts = verdicts or {}
    if format == "json":
        document = (
            [_whole(repository, run, verdicts) for run in runs]
            if table is None
            else _rows(repository, runs, table, verdicts)
        )
        # Lone surrogates become \\udXXX, which is how JSON itself spells them.
        return (json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1) + "\n").encode(
            "utf-8", "backslashreplace"
        )
    table = table or _table_of(runs)
    rows = _rows(repository, runs, table, verdicts)
    header = {
        "requests": _REQUEST_COLUMNS,
        "steps": _STEP_COLUMNS,
        "runs": _union_of_keys(rows),
        "kernels": _KERNEL_COLUMNS,
        "quantization": _QUANTIZATION_COLUMNS,
    }[table]
    return _to_csv(header, rows)


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


def _rows(repository: RunRepository, runs: Iterable[Run], table: Table, verdicts: Mapping[int, Row]) -> list[Row]:
    match table:
        case "requests":
            return [row for run in runs for row in repository.requests(run.run_id)]
        case "steps":
            return [row for run in runs for row in repository.steps(run.run_id)]
        case "kernels":
            return [row for run in runs for row in repository.kernel_results(run.run_id)]
        case "quantization":
            return [row for run in runs for row in repository.quantization_results(run.run_id)]
        case "runs":
            return [dict(_flatten(_run_fields(run, verdicts))) for run in runs]


def _whole(repository: RunRepository, run: Run, verdicts: Mapping[int, Row]) -> Row:
    whole = _run_fields(run, verdicts)
    if run.kind in _LABS:
        return whole | {run.kind: _rows(repository, [run], run.kind, verdicts)}
    return whole | {"requests": repository.requests(run.run_id), "steps": repository.steps(run.run_id)}


def _run_fields(run: Run, verdicts: Mapping[int, Row]) -> Row:
    values = {field.name: getattr(run, field.name) for field in fields(Run)}
    if run.run_id in verdicts:
        values["verdict"] = verdicts[run.run_id]
    return {
        name: value.isoformat() if isinstance(value, datetime) else plain_data(value) for name, value in values.items()
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
_REQUEST_COLUMNS = _columns(RequestRow)
_STEP_COLUMNS = [*_columns(StepRow), "num_steps", "kv_cache_usage"]
_KERNEL_COLUMNS = _columns(KernelResultRow)
_QUANTIZATION_COLUMNS = _columns(QuantizationResultRow)
