"""Files that a workload names, read line by line and no further than needed. Every problem names file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backend.errors import ConfigError

MAX_LINE_BYTES = 2**24


def read_lines(file: str) -> Iterator[tuple[str, str]]:
    """Each line, line break included, after its place, `path:number`; a byte order mark is left out.

    Raises `ConfigError` for a file that cannot be read, and for a line that is not UTF-8 or far too long.
    """
    path = Path(file)
    try:
        with path.expanduser().open("rb") as lines:
            number = 0
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{path}:{number}"
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{where}: the line is too long; at most {MAX_LINE_BYTES:,} bytes are read")
                try:
                    yield where, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise ConfigError(f"{where}: not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"source.file = {file!r}: {(error.strerror or str(error)).lower()}") from None
    except (RuntimeError, ValueError):  # an unknown user's ~, a null character
        raise ConfigError(f"source.file = {file!r}: no such file or directory") from None


def read_objects(file: str, expected: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON object in each line of a JSONL file, after its place; blank lines are passed over.

    `expected` says in an error what an object should hold: "the key 'prompt'". Raises `ConfigError`.
    """
    for where, text in read_lines(file):
        if not text.strip():
            continue
        try:
            record: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            if type(error) is ValueError:
                reason = "a number has thousands of digits"
            raise ConfigError(f"{where}: not JSON ({reason}); expected one JSON object per line") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: expected a JSON object with {expected}, not {kind_of(record)}")
        yield where, record


def value_at(record: dict[str, Any], key: str, where: str) -> Any:
    """The value of a key that must be there. Raises `ConfigError` naming the keys that are."""
    if key not in record:
        keys = ", ".join(repr(key) for key in record) or "none"
        raise ConfigError(f"{where}: no key {key!r}; keys in this line: {keys}")
    return record[key]


def kind_of(value: Any) -> str:
    """What a JSON value is, for an error."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", dict: "an object"}
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    return "null" if value is None else names[type(value)]
