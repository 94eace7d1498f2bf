"""One widget per setting. Values live in the session under the form's keys and survive a visit to another page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import streamlit as st

from app.components import form_fields as form
from app.components.fields import Field
from app.state import default_values

PREFIX = "form:"


def key_of(key: str) -> str:
    """The widget key of a setting."""
    return PREFIX + key


def seed() -> None:
    """Give every widget that has no value yet its default: widgets themselves are created without one."""
    for key, value in default_values().items():
        st.session_state.setdefault(key_of(key), value)


def fill(values: Mapping[str, Any]) -> None:
    """Put these values on the form. Only before its widgets are drawn, as in a callback."""
    for key, value in values.items():
        st.session_state[key_of(key)] = value


def values() -> dict[str, Any]:
    """The form as it stands."""
    state = {str(key): value for key, value in st.session_state.items()}
    return {key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)}


def value(key: str) -> Any:
    return st.session_state[key_of(key)]


def choice(
    key: str,
    options: Mapping[str, str],
    label: str,
    help_text: str = "",
    on_change: Callable[[], None] | None = None,
) -> str:
    """A selectbox over named options; `on_change` is called when somebody has chosen another one."""
    return st.selectbox(
        label,
        list(options),
        format_func=lambda option: options[option],
        key=key_of(key),
        help=help_text or None,
        on_change=on_change,
        persist_state="session",
    )


def _on_or_off(value: bool) -> str:
    return "on" if value else "off"


def setting(field: Field, label: str | None = None) -> None:
    """The widget that fits a setting's kind. An empty number is "auto" where the setting may be left out."""
    label = label or form.label_of(field.key)
    help_text = f"{field.help}  \n`{field.key}`".strip()
    common: dict[str, Any] = {"key": key_of(field.key), "help": help_text, "persist_state": "session"}
    match field.kind:
        case "choice":
            options = [option for option in field.choices if option is not None]
            if field.optional:
                st.selectbox(label, options, index=None, placeholder=form.empty_of(field.key), **common)
            else:
                st.selectbox(label, options, **common)
        case "toggle" if field.optional:
            empty = form.empty_of(field.key)
            st.selectbox(label, (True, False), index=None, format_func=_on_or_off, placeholder=empty, **common)
        case "toggle":
            st.toggle(label, **common)
        case "int":
            _number(label, field, step=1, as_type=int, **common)
        case "float":
            _number(label, field, step=0.1, as_type=float, **common)
        case "text":
            st.text_input(label, placeholder=form.empty_of(field.key) if field.optional else None, **common)
        case _:
            st.text_area(label, height=100, placeholder="one a line", **common)


def length(key: str, default: int) -> None:
    """A length: one number, or the parts of a distribution."""
    kind = value(f"{key}.kind")
    label = form.label_of(key)
    for part in form.LENGTH_PARTS[kind]:
        is_float = part in ("mean", "std")
        field = Field(f"{key}.{part}", "float" if is_float else "int", None, form.help_of(key))
        setting(field, label if part == "value" else f"{label}, {part}")


def length_kind(key: str) -> None:
    choice(
        f"{key}.kind",
        form.LENGTH_KINDS,
        f"{form.label_of(key)}: spread",
        "Whether all requests have one length, or lengths drawn from a distribution.",
    )


def _number(label: str, field: Field, *, step: float, as_type: type, **common: Any) -> None:
    # No bounds: a browser keeps a number it finds out of bounds to itself, and the run would start with another one.
    st.number_input(
        label,
        value=None,  # the session holds it; a default here would fight with it
        step=as_type(step),
        placeholder=form.empty_of(field.key) if field.optional else str(field.default),
        **common,
    )
