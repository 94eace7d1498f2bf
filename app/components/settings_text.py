"""Settings as text that can be pasted elsewhere: TOML files, `--set` lines, and the command that repeats a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from backend.config import EngineConfig
from backend.workload.spec import Workload

WORKLOAD_PREFIX = "workload."


def toml_document(data: Mapping[str, Any]) -> str:
    """Nested plain data as a TOML file. TOML has no null: what is None is left out, which means the default."""
    return "\n".join(_toml_table(data, ())).strip() + "\n"


def setting_lines(config: EngineConfig, workload: Workload) -> list[str]:
    """`key=value` for every setting that is not the default, as `servelab run --set` takes it."""
    lines = _differences(EngineConfig().to_dict(), config.to_dict(), "")
    # Arrivals that are left out are the source's, which need not be those of the default one.
    same_source = Workload.from_dict({"source": workload.source.to_dict()}).to_dict()
    default = Workload().to_dict() | {"arrivals": same_source["arrivals"]}
    return lines + _differences(default, workload.to_dict(), WORKLOAD_PREFIX)


def cli_command(config: EngineConfig, workload: Workload, label: str | None = None) -> str:
    """The command line that does the same run."""
    parts = ["servelab run"]
    parts += [f"--set {shlex.quote(line)}" for line in setting_lines(config, workload)]
    if label:
        parts.append(f"--label {shlex.quote(label)}")
    return " \\\n  ".join(parts)


def toml_value(value: Any) -> str:
    """One value as TOML writes it on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # JSON's escapes are TOML's, save for DEL, which TOML wants escaped as well.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case Mapping():
            items = (f"{key} = {toml_value(item)}" for key, item in value.items() if item is not None)
            return "{" + ", ".join(items) + "}"
    raise TypeError(f"{type(value).__name__} has no form in TOML")


def _toml_table(data: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [
        f"{key} = {toml_value(value)}"
        for key, value in data.items()
        if value is not None and not isinstance(value, Mapping)
    ]
    if lines and path:
        lines.insert(0, f"[{'.'.join(path)}]")
    for key, value in data.items():
        if isinstance(value, Mapping):
            nested = _toml_table(value, (*path, key))
            lines += (["", *nested] if lines else nested) if nested else []
    return lines


def _differences(default: Mapping[str, Any], actual: Mapping[str, Any], prefix: str) -> list[str]:
    lines: list[str] = []
    for key, value in actual.items():
        known = default.get(key)
        if value == known or value is None:
            continue
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            if value.get("kind") == known.get("kind"):
                lines += _differences(known, value, f"{prefix}{key}.")
            else:  # another kind of table: nothing of the default is left
                lines += _differences({}, value, f"{prefix}{key}.")
        else:
            lines.append(f"{prefix}{key}={toml_value(value)}")
    return lines
