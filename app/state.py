"""The Run form's values as settings and back, and what a page's address asks for. Pure: no Streamlit, no database.

A form keeps its values under the keys that `--set` uses (`cache.block_size`, `workload.seed`) and is read as a list of
`--set` lines by the function that reads the command line's: both start the same run, error messages included.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from app.components import form_fields as form
from app.components.fields import Field
from app.components.settings_text import setting_lines, toml_value
from app.settings_input import engine_config_and_workload
from backend.config import DEFAULT_MODEL, EngineConfig
from backend.errors import ConfigError
from backend.workload.spec import Workload
from db.run_ids import parse_run_id

Values = Mapping[str, Any]

_ALWAYS_SHOWN = (*form.CONFIG_FIELDS, *form.SAMPLING_FIELDS, *form.SLO_FIELDS, *form.RUN_FIELDS)
_ALL_FIELDS: dict[str, Field] = {}
for _field in (
    *_ALWAYS_SHOWN,
    *(field for fields in (*form.SOURCE_FIELDS.values(), *form.ARRIVAL_FIELDS.values()) for field in fields),
):
    _ALL_FIELDS.setdefault(_field.key, _field)  # where kinds share a key, an empty box is the default of each


def default_values() -> dict[str, Any]:
    """Every value of the untouched form; it reads as `EngineConfig()` and `Workload()`."""
    values: dict[str, Any] = {
        form.MODEL: DEFAULT_MODEL,
        form.SOURCE: "built_in",
        form.ARRIVALS: "all_at_once",
        form.LABEL: "",
        form.OVERRIDES: "",
    }
    values |= {field.key: to_widget(field, field.default) for field in _ALL_FIELDS.values()}
    for key, length in form.LENGTHS.items():
        values |= _length_values(key, length)
    return values


def read_form(values: Values) -> tuple[EngineConfig, Workload]:
    """The settings a form describes; what it does not hold is the default. Raises `ConfigError` naming the setting."""
    return engine_config_and_workload(None, None, form_lines(values))


def form_lines(values: Values) -> list[str]:
    """A form as `--set` lines: what differs from the defaults, then the lines typed by hand, which win."""
    values = default_values() | dict(values)
    lines = []
    if not (values[form.MODEL] or "").strip():
        raise ConfigError("model.name is empty: choose a model")
    if values[form.MODEL] != DEFAULT_MODEL:
        lines.append(f"{form.MODEL}={toml_value(values[form.MODEL].strip())}")
    for field in _ALWAYS_SHOWN:
        lines += _field_line(field, values)
    lines += (
        _source_lines(values)
        + _arrival_lines(values)
        + _length_lines(form.OUTPUT_LEN, form.LENGTHS[form.OUTPUT_LEN], values)
    )
    return lines + [_tidy(line) for line in values[form.OVERRIDES].splitlines() if line.strip()]


def fill_form(config: EngineConfig, workload: Workload, label: str | None = None) -> dict[str, Any]:
    """The values that read as these settings; what the form has no field for goes into its free lines."""
    wanted = setting_lines(config, workload)
    data = _flat(config.to_dict(), "") | _flat(workload.to_dict(), "workload.")
    values = default_values()
    values |= {form.MODEL: config.model.name, form.LABEL: label or "", form.SOURCE: _source_choice(data)}
    values[form.ARRIVALS] = data["workload.arrivals.kind"]
    for key, value in data.items():
        if value is None:
            continue
        if key in _ALL_FIELDS:
            values[key] = to_widget(_ALL_FIELDS[key], value)
        elif key in form.LENGTHS:
            values |= _length_values(key, value)
    try:
        missing = sorted(set(wanted) - set(setting_lines(*read_form(values))))
    except ConfigError:
        missing = wanted
    values[form.OVERRIDES] = "\n".join(missing)
    return values


def to_widget(field: Field, value: Any) -> Any:
    """A setting as its widget holds it: lists as text, one item a line."""
    if field.kind in ("text_list", "int_list"):
        return "\n".join(str(item) for item in value or ())
    if field.kind == "text":
        return value or ""
    return value // field.scale if field.scale != 1 else value


def from_widget(field: Field, value: Any) -> Any:
    """A widget's value as the setting. An empty box is the default. Raises `ConfigError`."""
    match field.kind:
        case "text_list":
            items = [line for line in (value or "").splitlines() if line.strip()]
            return items or field.default
        case "int_list":
            words = re.split(r"[\s,]+", (value or "").strip())
            try:
                return [int(word) for word in words if word]
            except ValueError:
                raise ConfigError(f"{field.key} = {value!r}: whole numbers, separated by commas or lines") from None
        case "text":
            return (value or "").strip() or field.default
    if value is None:
        return field.default
    return value * field.scale if field.scale != 1 else value


def run_ids_in(text: str | None) -> tuple[list[int], list[str]]:
    """Run ids of `12,13` in order, each once, and what in it is no run id."""
    ids: list[int] = []
    strange: list[str] = []
    for part in (text or "").split(","):
        run_id = parse_run_id(part)
        if run_id is None:
            strange += [part.strip()] if part.strip() else []
        elif run_id not in ids:
            ids.append(run_id)
    return ids, strange


def address_of(run_ids: Sequence[int]) -> str:
    """What `run_ids_in` reads back."""
    return ",".join(str(run_id) for run_id in run_ids)


def _tidy(line: str) -> str:
    """A line typed by hand may have room around its first "="."""
    key, equals, value = line.partition("=")
    return f"{key.strip()}{equals}{value.strip()}"


def _field_line(field: Field, values: Values) -> list[str]:
    value = from_widget(field, values[field.key])
    if value is None or value == field.default:
        return []
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{field.key} = {value}: a finite number")
    return [f"{field.key}={toml_value(value)}"]


def _source_lines(values: Values) -> list[str]:
    choice = values[form.SOURCE]
    lines = [] if choice in ("built_in", "own", "file") else [f"{form.SOURCE}.kind={toml_value(choice)}"]
    for field in form.SOURCE_FIELDS[choice]:
        line = _field_line(field, values)
        if field.key == form.NEEDED.get(choice) and not line:
            raise ConfigError(f"{field.key} is empty; it takes: {field.help}")
        lines += line
    for key in form.SOURCE_LENGTHS.get(choice, ()):
        lines += _length_lines(key, form.LENGTHS[key], values)
    return lines


def _arrival_lines(values: Values) -> list[str]:
    kind = values[form.ARRIVALS]
    if kind == "all_at_once" and values[form.SOURCE] not in form.TRACES:
        return []
    settings = {field.key: from_widget(field, values[field.key]) for field in form.ARRIVAL_FIELDS.get(kind, ())}
    return [f"{key}={toml_value(value)}" for key, value in ({form.ARRIVALS: kind} | settings).items()]


def _length_lines(key: str, default: int, values: Values) -> list[str]:
    kind = values[f"{key}.kind"]
    parts = {part: values[f"{key}.{part}"] for part in form.LENGTH_PARTS[kind]}
    if kind == "fixed":
        value = parts["value"]
        return [] if value in (None, default) else [f"{key}={toml_value(value)}"]
    return [f"{key}={toml_value({'kind': kind, **parts})}"]


def _length_values(key: str, length: int | Mapping[str, Any]) -> dict[str, Any]:
    """The widgets of a length. Kinds that it is not start from values near it."""
    table = {"kind": "fixed", "value": length} if isinstance(length, int) else dict(length)
    middle = int(table.get("value") or table.get("mean") or (table["min"] + table["max"]) / 2)
    start = {
        "value": middle,
        "min": max(1, middle // 2),
        "max": middle * 2,
        "mean": float(middle),
        "std": float(middle // 4),
    }
    return {f"{key}.{part}": value for part, value in (start | table).items()}


def _source_choice(data: Values) -> str:
    kind = data[f"{form.SOURCE}.kind"]
    if kind != "prompts":
        return kind
    if data[f"{form.SOURCE}.prompts"] is not None:
        return "own"
    return "file" if data[f"{form.SOURCE}.file"] is not None else "built_in"


def _flat(data: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Dotted keys; a length that is a table stays whole."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in form.LENGTHS:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
