"""What the Sizing page is asked, and its place in the address. Pure: no Streamlit.

`/sizing?llm=Llama-3-8B&card=L4+24+GB&prompt=4000`; what is left out is the default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import quote

from backend.analysis.kv_size import KVDtype
from backend.analysis.parameters import WeightDtype

# Not "model": History's filter is bound to that name, and a name has one owner in the whole session.
MODEL, CONFIG, CARD, CARD_GIB = "llm", "config", "card", "card_gib"
PROMPT, OUTPUT, KV_DTYPE, WEIGHT_DTYPE = "prompt", "output", "kv", "weights"
BLOCK_SIZE, UTILIZATION, RESERVE_GIB = "block", "share", "reserve_gib"
CONTEXT, WEIGHTS_GIB = "context", "weights_gib"

PASTED = "pasted"  # the model whose config.json is in the text area
TYPED = "typed"  # the card whose memory is typed in

_LONGEST_NUMBER = 10**12
_LONGEST_CONFIG = 6_000  # characters in an address: browsers and servers take a few times as many

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One input. `options` empty: any text."""

    kind: Literal["text", "int", "float"]
    default: Any
    options: tuple[str, ...] = ()


def parameters(cards: tuple[str, ...]) -> dict[str, Parameter]:
    """Every input by its name in the address; `cards` can be chosen, the first by default."""
    return {
        MODEL: Parameter("text", "Llama-3.1-8B"),
        CONFIG: Parameter("text", ""),
        CARD: Parameter("text", cards[0], cards),
        CARD_GIB: Parameter("float", 24.0),
        PROMPT: Parameter("int", 1000),
        OUTPUT: Parameter("int", 250),
        KV_DTYPE: Parameter("text", "auto", get_args(KVDtype)),
        WEIGHT_DTYPE: Parameter("text", "auto", get_args(WeightDtype)),
        BLOCK_SIZE: Parameter("int", 16),
        UTILIZATION: Parameter("float", 0.9),
        RESERVE_GIB: Parameter("float", 2.0),
        CONTEXT: Parameter("int", None),
        WEIGHTS_GIB: Parameter("float", None),
    }


def read_address(address: Values, known: Mapping[str, Parameter]) -> tuple[dict[str, Any], list[str]]:
    """The values that an address asks for, defaults where it asks for none, and what in it cannot be."""
    values = {name: parameter.default for name, parameter in known.items()}
    problems = []
    for name, text in address.items():
        if name not in known:
            continue
        try:
            values[name] = _parsed(text, known[name])
        except ValueError as error:
            problems.append(f"{name} = {text[:80]}: {error}")
    if values[CONFIG]:
        values[CONFIG] = _indented(values[CONFIG])
    return values, problems


def write_address(values: Values, known: Mapping[str, Parameter]) -> dict[str, str]:
    """What `read_address` reads back. The model is always named; a config that is too long for an address is left out."""
    address = {MODEL: str(values[MODEL])}
    for name, parameter in known.items():
        value = values[name]
        if name == MODEL or value is None or value == parameter.default:
            continue
        if name == CONFIG:
            if values[MODEL] == PASTED and (text := _short(value)) is not None:
                address[name] = text
        elif name != CARD_GIB or values[CARD] == TYPED:
            address[name] = f"{value:.12g}" if isinstance(value, float) else str(value)
    return address


def fits_address(config_text: str) -> bool:
    """Whether a link can carry this config."""
    return _short(config_text) is not None


def _parsed(text: str, parameter: Parameter) -> Any:
    if parameter.kind == "text":
        if parameter.options and text not in parameter.options:
            raise ValueError(f"not one of {', '.join(parameter.options)}")
        return text
    try:
        value = int(text) if parameter.kind == "int" else float(text)
    except ValueError:
        raise ValueError("not a whole number" if parameter.kind == "int" else "not a number") from None
    if not math.isfinite(value) or abs(value) > _LONGEST_NUMBER:
        raise ValueError(f"not within ±{_LONGEST_NUMBER:,}")
    return value


def _short(text: str) -> str | None:
    """The text without its white space where it is JSON; None where it is still too long."""
    try:
        text = json.dumps(json.loads(text), separators=(",", ":"))
    except (ValueError, RecursionError):
        text = text.strip()
    return text if len(quote(text)) <= _LONGEST_CONFIG else None


def _indented(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=2)
    except (ValueError, RecursionError):
        return text
