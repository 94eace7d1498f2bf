"""Recorded requests: when each arrived, the lengths of prompt and answer, and which blocks its prompt was made of."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from backend.errors import ConfigError
from backend.workload.files import kind_of, read_lines, read_objects, value_at
from backend.workload.spec import MAX_LENGTH, MooncakeSource, TraceSource

CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
JSON_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")

MAX_TIME_MS = 2**53  # whole milliseconds up to there are exact

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; lengths in tokens."""

    time_s: float  # after the trace's first request
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()  # of the prompt's blocks; the last may be longer than what is left of the prompt


def read_trace(source: TraceSource | MooncakeSource) -> list[TraceRow]:
    """The first `source.limit` requests, scaled and cut as the source says, in the order of the file.

    Raises `ConfigError` naming file, line and column for anything that cannot be used, times that go backwards among it.
    """
    rows = list(islice(_csv_rows(source) if isinstance(source, TraceSource) else _json_rows(source), source.limit))
    if not rows:
        names = ", ".join(CSV_COLUMNS if isinstance(source, TraceSource) else JSON_KEYS)
        raise ConfigError(f"{source.file} holds no requests; expected {names}")
    return [
        replace(
            row,
            time_s=row.time_s - rows[0].time_s,
            prompt_len=min(row.prompt_len, source.max_prompt_len or MAX_LENGTH),
            output_len=min(row.output_len, source.max_output_len or MAX_LENGTH),
        )
        for row in rows
    ]


def fit(row: TraceRow, max_model_len: int | None) -> TraceRow:
    """The row, cut so that prompt and answer fit into a context.

    Of a prompt its end goes, until the answer has room or half of the context is left to the prompt; then the answer's end.
    """
    if max_model_len is None or row.prompt_len + row.output_len <= max_model_len:
        return row
    prompt_len = max(1, min(row.prompt_len, max_model_len - min(row.output_len, max_model_len // 2)))
    return replace(row, prompt_len=prompt_len, output_len=max(1, min(row.output_len, max_model_len - prompt_len)))


def _csv_rows(source: TraceSource) -> Iterator[TraceRow]:
    columns: list[str] | None = None
    first_ns = last_ns = None
    for where, cells in _csv_records(source.file):
        if columns is None:
            columns = cells
            missing = [name for name in CSV_COLUMNS if name not in columns]
            if missing:
                raise ConfigError(
                    f"{where}: no column {missing[0]!r}; columns in this file: {', '.join(columns)[:100]}"
                )
            doubled = [name for name in CSV_COLUMNS if columns.count(name) > 1]
            if doubled:
                raise ConfigError(f"{where}: column {doubled[0]!r} is there {columns.count(doubled[0])} times")
            continue
        if len(cells) != len(columns):
            raise ConfigError(f"{where}: {len(cells)} values; the file has {len(columns)} columns")
        row = dict(zip(columns, cells, strict=True))
        time_ns = _nanoseconds(row["TIMESTAMP"], f"{where}: TIMESTAMP")
        if last_ns is not None and time_ns < last_ns:
            raise _backwards(f"{where}: TIMESTAMP", repr(row["TIMESTAMP"]))
        first_ns, last_ns = time_ns if first_ns is None else first_ns, time_ns
        prompt_len, output_len = (_whole_number(row[name], f"{where}: {name}") for name in CSV_COLUMNS[1:])
        yield TraceRow((time_ns - first_ns) / 1e9, prompt_len, output_len)


def _csv_records(file: str) -> Iterator[tuple[str, list[str]]]:
    """The stripped cells of each record after the place of its first line; records without any text are passed over."""
    place = ""

    def lines() -> Iterator[str]:
        nonlocal place
        for where, line in read_lines(file):
            place = place or where
            yield line

    records = csv.reader(lines(), strict=True)
    while True:
        place = ""
        try:
            cells = [cell.strip() for cell in next(records)]
        except StopIteration:
            return
        except csv.Error as error:
            raise ConfigError(f"{place}: not CSV ({error})") from None
        if any(cells):
            yield place, cells


def _nanoseconds(text: str, where: str) -> int:
    """Since 1970 in UTC, which is also taken for a time that names no zone."""
    match = _TIMESTAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1] + (match[3] or "+00:00"))
    except ValueError:
        raise ConfigError(f"{where} = {text!r}: expected a time such as 2023-11-16 18:15:46.6805900") from None
    seconds = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    return seconds * 10**9 + int((match[2] or "0").ljust(9, "0"))


def _whole_number(text: str, where: str) -> int:
    return _length(int(text) if re.fullmatch("[0-9]{1,18}", text) else None, repr(text), where)


def _json_rows(source: MooncakeSource) -> Iterator[TraceRow]:
    first_ms = last_ms = None
    expected = f"the keys {', '.join(repr(key) for key in JSON_KEYS)}"
    for where, record in read_objects(source.file, expected):
        timestamp, *lengths, hash_ids = (value_at(record, key, where) for key in JSON_KEYS)
        if not _is_number(timestamp) or not 0 <= timestamp <= MAX_TIME_MS:
            raise ConfigError(
                f"{where}: timestamp is {_shown(timestamp)}; expected milliseconds from 0 to {MAX_TIME_MS:,}"
            )
        if last_ms is not None and timestamp < last_ms:
            raise _backwards(f"{where}: timestamp", _shown(timestamp))
        first_ms, last_ms = timestamp if first_ms is None else first_ms, timestamp
        prompt_len, output_len = (
            _length(value, _shown(value), f"{where}: {key}") for key, value in zip(JSON_KEYS[1:3], lengths, strict=True)
        )
        yield TraceRow(
            (timestamp - first_ms) / 1e3,
            math.ceil(prompt_len / source.scale),
            math.ceil(output_len / source.scale),
            _hash_ids(hash_ids, prompt_len, source.block_len, f"{where}: hash_ids"),
        )


def _hash_ids(value: Any, prompt_len: int, block_len: int, where: str) -> tuple[int, ...]:
    """One for every block; the block that a prompt ends in may be left out, which some writers of traces do."""
    if not isinstance(value, list):
        raise ConfigError(f"{where} is {kind_of(value)}; expected a list of whole numbers")
    for hash_id in value:
        if type(hash_id) is not int or not 0 <= hash_id < 2**64:
            raise ConfigError(f"{where} holds {_shown(hash_id)}; expected whole numbers from 0 to 2**64 - 1")
    full, blocks = prompt_len // block_len, math.ceil(prompt_len / block_len)
    if not full <= len(value) <= blocks:
        raise ConfigError(
            f"{where} has {len(value):,} ids, but {prompt_len:,} tokens in blocks of source.block_len = {block_len:,} "
            f"take {blocks:,}"
        )
    return tuple(value)


def _length(value: Any, shown: str, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_LENGTH:
        raise ConfigError(f"{where} = {shown}: expected a whole number of tokens from 1 to {MAX_LENGTH:,}")
    return value


def _backwards(where: str, shown: str) -> ConfigError:
    return ConfigError(f"{where} = {shown} is before the row above; a trace must be in the order of its times")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A JSON value in an error: short ones as they are."""
    return repr(value)[:40] if isinstance(value, int | float | str) else kind_of(value)
