"""Form fields derived from settings classes: what the settings allow is what the form offers. No Streamlit."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from backend.settings import Settings

FieldKind = Literal["choice", "toggle", "int", "float", "text", "text_list", "int_list"]


@dataclass(frozen=True, slots=True)
class Field:
    """One setting as a form shows it. `key` is dotted, as `--set` takes it."""

    key: str
    kind: FieldKind
    default: Any  # None: left out, and decided when the run starts
    help: str
    choices: tuple[Any, ...] = ()
    scale: int = 1  # a form shows whole multiples of so many: bytes as MiB

    @property
    def optional(self) -> bool:
        return self.default is None


def fields_of(settings: type[Settings], prefix: str = "") -> Iterator[Field]:
    """Every setting that leaves a choice, depth first. Tables that come in kinds are the form's own business."""
    for name, info in settings.model_fields.items():
        nested = info.annotation
        if isinstance(nested, type) and issubclass(nested, Settings):
            yield from fields_of(nested, f"{prefix}{name}.")
        else:
            field = _field(f"{prefix}{name}", info)
            if field is not None:
                yield field


def _field(key: str, info: FieldInfo) -> Field | None:
    """The field of one setting, or None where there is nothing to choose or no single widget for it."""
    options = [option for option in _members(info.annotation) if option is not type(None)]
    if len(options) != 1:
        return None
    option = options[0]
    help_text = info.description or ""
    default = list(info.default) if isinstance(info.default, tuple) else info.default
    if get_origin(option) is Literal:
        choices = get_args(option)
        if type(None) in _members(info.annotation):
            choices = (None, *choices)
        return Field(key, "choice", default, help_text, choices) if len(choices) > 1 else None
    if get_origin(option) is tuple:
        item = get_args(option)[0]
        kind: FieldKind = "text_list" if item is str else "int_list"
        return Field(key, kind, default, help_text)
    kinds: dict[Any, FieldKind] = {bool: "toggle", int: "int", float: "float", str: "text"}
    if option not in kinds:
        return None
    return Field(key, kinds[option], default, help_text)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (types.UnionType, Union) else (annotation,)
