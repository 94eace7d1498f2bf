"""The fields of a JSON file of a checkpoint, checked as they are read."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any, TypeVar

from backend.errors import ModelError

T = TypeVar("T", bound=str)
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 80


def shown(value: Any) -> str:
    """A foreign file's value in an error line, whatever its size and depth."""
    return _shown.repr(value)


class JsonFields:
    """A JSON object whose values are checked as they are read; a null counts as absent, as in transformers."""

    def __init__(self, path: Path, data: dict[str, Any] | None = None) -> None:
        self.path = path
        self.data = _read_json_object(path) if data is None else data

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")

    def get(self, key: str) -> Any:
        return self.data.get(key)

    def has(self, key: str) -> bool:
        """Whether the file names it, be it with a null."""
        return key in self.data

    def refuse(self, key: str, what: str) -> None:
        if self.get(key) is not None:
            raise self.error(f"{key} is set, and {what} not supported")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int) -> int:
        value = self._present(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f"{key} {shown(value)} is not an integer from {least} to {most:,}")
        return value

    def number(self, key: str, default: float | None = None, *, within: tuple[float, float]) -> float:
        value = self._present(key, default)
        least, most = within
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f"{key} {shown(value)} is not a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} {shown(value)} is neither true nor false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} {shown(value)} is not a string")
        return value

    def table(self, key: str) -> JsonFields | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{key} {shown(value)} is not an object")
        return JsonFields(self.path, value)

    def one_of(self, what: str, value: str, supported: tuple[T, ...]) -> T:
        """`value` as one of those; `what` names it in the error."""
        for known in supported:
            if known == value:
                return known
        raise self.error(f"{what} {shown(value)} is not supported; supported: {', '.join(supported)}")

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a model folder holds config.json and safetensors files") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: not readable as JSON ({getattr(error, 'strerror', None) or error})") from None
    except RecursionError:
        raise ModelError(f"{path}: not readable as JSON (nested too deeply)") from None
    except ValueError:
        raise ModelError(f"{path}: not readable as JSON (a number has thousands of digits)") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: holds {type(data).__name__}, not a JSON object")
    return data
