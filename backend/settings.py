"""Strict, frozen settings: the base of `EngineConfig`, `Workload` and `SamplingParams`.

Unknown keys and impossible values raise `ConfigError` with one line that names the dotted key, the value and what is
allowed. Values round-trip through JSON and have a hash that is stable across processes.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from backend.errors import ConfigError

_MAX_TOML_BYTES = 2**22


class _SettingsMeta(type(BaseModel)):
    """Makes a direct construction raise `ConfigError`; nested ones are validated by their parent, which knows their place."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            raise ConfigError(describe_errors(error, cls)) from None


class Settings(BaseModel, metaclass=_SettingsMeta):
    """Frozen settings that refuse unknown keys and silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build from nested plain data. Raises `ConfigError`."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise ConfigError(describe_errors(error, cls)) from None

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read a TOML file. Raises `ConfigError` for a missing file, bad syntax or bad values."""
        try:
            return cls.from_dict(read_toml(path))
        except ValueError:  # a number too long for Python to read, or to show in an error
            raise ConfigError(f"{path}: a number has thousands of digits") from None

    def to_dict(self) -> dict[str, Any]:
        """Nested plain data that `from_dict` turns back into an equal object."""
        return self.model_dump(mode="json")

    def with_overrides(self, overrides: Mapping[str, Any]) -> Self:
        """A copy with dotted keys replaced, as in `{"cache.block_size": 32}`. Raises `ConfigError`.

        Overriding a table's `kind` starts that table afresh, since the other keys belonged to the old kind.
        """
        data = self.to_dict()
        for key, value in sorted(overrides.items(), key=lambda item: not item[0].endswith(".kind")):
            *parents, last = key.split(".")
            table = data
            for parent in parents:
                child = table.get(parent)
                if not isinstance(child, dict):
                    child = table[parent] = {}
                table = child
            if last == "kind" and table.get("kind") != value:
                table.clear()
            table[last] = value
        return type(self).from_dict(data)

    def stable_hash(self) -> str:
        """16 hex digits of the SHA-256 of the canonical JSON: equal settings, equal hash, in every process."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class Section(Settings):
    """A table of the engine's config."""

    @field_validator("*", mode="before")
    @classmethod
    def _literals_keep_their_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes True for 1 and 0 for False; a setting does not."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        allowed = get_args(annotation) if get_origin(annotation) is Literal else ()
        if allowed and not any(type(value) is type(item) and value == item for item in allowed):
            expected = ", ".join(repr(item) for item in allowed)
            raise PydanticCustomError("literal_error", "not allowed", {"expected": expected})
        return value


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file's tables. Raises `ConfigError` naming the file and what is wrong with it."""
    try:
        path = Path(path).expanduser()
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a regular file")
        if path.stat().st_size > _MAX_TOML_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size:,} bytes; at most {_MAX_TOML_BYTES:,} are read")
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except RuntimeError:  # from expanduser
        raise ConfigError(f"{path}: there is no such user's home folder") from None


def describe_errors(error: ValidationError, cls: type) -> str:
    """One line for a failed validation: dotted key, offending value, what is allowed."""
    lines = []
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        if location and "tagged-union" in location[-1] and not isinstance(item["input"], dict):
            continue  # a plain value where a table is possible too: the plain branch has said what is wrong
        if "constrained-int" in location and isinstance(item["input"], dict):
            continue
        keys, _ = _walk(cls, location)
        _, tables = _walk(cls, location[:-1])
        neighbours = list(tables[0].model_fields) if tables else []
        lines.append(_describe(".".join(keys), item, neighbours))
    return "; ".join(dict.fromkeys(lines))


def _describe(key: str, item: Any, neighbours: list[str]) -> str:
    match item["type"]:
        case "extra_forbidden":
            return f"unknown key {key!r}; allowed here: {', '.join(neighbours) or 'none'}"
        case "missing":
            return f"{key} is missing: it has no default"
        case "value_error":
            return f"{key + ': ' if key else ''}{item['ctx']['error']}"
        case "literal_error":
            return f"{key} = {item['input']!r} is not supported; allowed: {item['ctx']['expected']}"
        case "none_required":
            return f"{key} = {item['input']!r} is not supported; allowed: leave it out"
        case "union_tag_invalid":
            return f"{key}.kind = {item['ctx']['tag']!r} is not supported; allowed: {item['ctx']['expected_tags']}"
        case "union_tag_not_found":
            return f"{key}.kind is missing: it says which kind the table is"
    message = item["msg"].replace("tuple", "list")
    return f"{key} = {item['input']!r}: {message[:1].lower()}{message[1:]}"


def _walk(cls: type, location: list[str]) -> tuple[list[str], list[type[BaseModel]]]:
    """Follow an error's location: its parts that are keys (a union's tags are not), and the classes it ends in."""
    keys: list[str] = []
    options: list[type[BaseModel]] = [cls]
    for part in location:
        tagged = [option for option in options if _kind(option) == part] if len(options) > 1 else []
        if tagged:
            options = tagged
        elif "[" not in part and part != "constrained-int":
            keys.append(part)
            field = next((option.model_fields[part] for option in options if part in option.model_fields), None)
            options = _settings_in(field.annotation) if field else []
    return keys, options


def _kind(cls: type[BaseModel]) -> str | None:
    field = cls.model_fields.get("kind")
    return field.default if field else None


def _settings_in(annotation: Any) -> list[type[BaseModel]]:
    """All settings classes that an annotation admits."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _settings_in(argument)]
