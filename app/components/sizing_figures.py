"""All figures of the Sizing page at once, from the closed forms in `backend.analysis`. Pure: no Streamlit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from app.components import sizing_state as state
from app.components.sizing_state import Values
from backend.analysis.kv_size import KVDtype, KVSize, RequestKV, kv_size
from backend.analysis.memory import CardMemory, LongestContext, RequestsThatFit, card_memory
from backend.analysis.memory_waste import MemoryWaste, memory_waste
from backend.analysis.parameters import ModelWeights, PartTotals, read_weights

GIB = 2**30
COMPARED_DTYPES: tuple[KVDtype, ...] = ("auto", "fp8_e4m3", "int8", "int4")
_MOST_SHOWN = 10_000  # requests in the lines of arithmetic

_WORDS = {
    state.CARD_GIB: "the card's memory",
    state.PROMPT: "the prompt's length",
    state.OUTPUT: "the output's length",
    state.BLOCK_SIZE: "the block size",
    state.UTILIZATION: "the share of the card's memory",
    state.RESERVE_GIB: "the reserve for activations",
    state.WEIGHTS_GIB: "the weights' size",
}


@dataclass(frozen=True, slots=True)
class Weights:
    """What the weights take; `model` is None where their bytes were typed in."""

    num_bytes: int
    model: ModelWeights | None
    totals: PartTotals | None


@dataclass(frozen=True, slots=True)
class OnCard:
    """What fits beside the weights."""

    memory: CardMemory
    fit: RequestsThatFit
    longest: LongestContext


@dataclass(frozen=True, slots=True)
class Sizing:
    kv: KVSize
    request: RequestKV
    block_size: int
    weights: Weights | None
    weights_problem: str | None  # why there are none
    on_card: OnCard | None  # needs the weights

    @property
    def length(self) -> int:
        return self.request.num_tokens


@dataclass(frozen=True, slots=True)
class DtypeRow:
    """One KV dtype beside the others; all but `dtype` and `problem` are None where the model cannot have it."""

    dtype: KVDtype
    kv: KVSize | None
    request_bytes: int | None
    factor: float | None  # of auto's bytes
    on_card: OnCard | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One request in a layout of the KV cache, at its full length."""

    reserved_bytes: int
    used_bytes: int
    num_requests: int | None  # that fit; None without a card

    @property
    def unused_share(self) -> float:
        """Of the reserved bytes, 0…1: those that hold no token even when the request ends."""
        return 1 - self.used_bytes / self.reserved_bytes


@dataclass(frozen=True, slots=True)
class Layouts:
    contiguous: LayoutRow
    paged: LayoutRow
    max_model_len: int
    num_requests: int  # that `arithmetic` is of
    arithmetic: MemoryWaste | None  # in slots; None where windows make layers differ


def size_up(config: Mapping[str, Any], values: Values, card_bytes: int | None = None) -> Sizing:
    """Everything but the comparisons.

    Args:
        config: a Hugging Face config.
        values: the inputs, by their names in the address.
        card_bytes: of the chosen card; None takes what is typed in.

    Raises:
        ValueError: an input is empty or out of range, or the config cannot be sized. Weights that cannot be counted are
            `weights_problem`: the KV cache is known without them.
    """
    kv = kv_size(config, values[state.KV_DTYPE])
    prompt, output = _length(values, state.PROMPT), _length(values, state.OUTPUT)
    block_size = _given(values, state.BLOCK_SIZE)
    kv.blocks(block_size)
    request = kv.request(prompt + output)
    card_bytes = _card_bytes(values) if card_bytes is None else card_bytes
    # Checked before the weights, so that a wrong input is named whatever the model.
    card = card_memory(
        kv,
        card_bytes=card_bytes,
        weight_bytes=0,
        activation_bytes=_from_gib(values, state.RESERVE_GIB),
        gpu_memory_utilization=_given(values, state.UTILIZATION),
        block_size=block_size,
    )
    try:
        weights = _weights(config, values)
    except ValueError as error:
        return Sizing(kv, request, block_size, None, str(error), None)
    return Sizing(kv, request, block_size, weights, None, _on_card(card, kv, weights.num_bytes, prompt, output))


def compare_dtypes(config: Mapping[str, Any], values: Values, sizing: Sizing) -> list[DtypeRow]:
    """The KV dtypes on the same card, and the chosen one where it is none of them."""
    chosen = values[state.KV_DTYPE]
    dtypes = COMPARED_DTYPES if chosen in COMPARED_DTYPES else (*COMPARED_DTYPES, chosen)
    rows: list[DtypeRow] = []
    baseline: int | None = None
    for dtype in dtypes:
        try:
            kv = kv_size(config, dtype)
        except ValueError as error:
            rows.append(DtypeRow(dtype, None, None, None, None, str(error)))
            continue
        baseline = kv.bytes_per_token if dtype == "auto" else baseline
        on_card = None
        if sizing.on_card is not None and sizing.weights is not None:
            on_card = _on_card(
                sizing.on_card.memory, kv, sizing.weights.num_bytes, values[state.PROMPT], values[state.OUTPUT]
            )
        factor = kv.bytes_per_token / baseline if baseline else None
        rows.append(DtypeRow(dtype, kv, kv.request(sizing.length).num_bytes, factor, on_card, None))
    return rows


def compare_layouts(values: Values, sizing: Sizing) -> Layouts:
    """One contiguous reservation per request against blocks.

    A contiguous layer with a window reserves the window alone.

    Raises:
        ValueError: no context length is known, or the request is longer than it.
    """
    kv, length = sizing.kv, sizing.length
    max_model_len = values[state.CONTEXT]
    if max_model_len is None:
        max_model_len = kv.shape.max_position_embeddings
    if max_model_len is None:
        raise ValueError("the config names no max_position_embeddings: type a context length")
    num_requests = min(sizing.on_card.fit.num_requests if sizing.on_card else 0, _MOST_SHOWN)
    waste = memory_waste([length] * max(1, num_requests), max_model_len, sizing.block_size)
    reserved = {
        "contiguous": kv.request(max_model_len).num_bytes,
        "paged": kv.blocks(sizing.block_size).request_bytes(length),
    }
    room = max(0, sizing.on_card.memory.kv_bytes) if sizing.on_card else None
    rows = {
        name: LayoutRow(size, sizing.request.num_bytes, None if room is None else room // size)
        for name, size in reserved.items()
    }
    return Layouts(
        rows["contiguous"], rows["paged"], max_model_len, num_requests, None if kv_has_windows(kv) else waste
    )


def kv_has_windows(kv: KVSize) -> bool:
    return any(group.window is not None for group in kv.groups)


def _weights(config: Mapping[str, Any], values: Values) -> Weights:
    if values[state.WEIGHTS_GIB] is not None:
        return Weights(_from_gib(values, state.WEIGHTS_GIB), None, None)
    model = read_weights(config)
    totals = model.num_bytes(values[state.WEIGHT_DTYPE])
    return Weights(totals.total, model, totals)


def _on_card(card: CardMemory, kv: KVSize, weight_bytes: int, prompt: int, output: int) -> OnCard:
    memory = card_memory(
        kv,
        card_bytes=card.card_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=card.activation_bytes,
        gpu_memory_utilization=card.gpu_memory_utilization,
        block_size=card.blocks.block_size,
    )
    return OnCard(memory, memory.requests_of(prompt, output), memory.longest_context())


def _length(values: Values, name: str) -> int:
    value = cast(int, _given(values, name))
    if value < 1:
        raise ValueError(f"{_WORDS[name]} is {value:,}; it has at least 1 token")
    return value


def _card_bytes(values: Values) -> int:
    card_bytes = _from_gib(values, state.CARD_GIB)
    if card_bytes < 1:
        raise ValueError(f"{_WORDS[state.CARD_GIB]} is {values[state.CARD_GIB]:g} GiB; it is at least 1 byte")
    return card_bytes


def _from_gib(values: Values, name: str) -> int:
    value = _given(values, name)
    if not math.isfinite(value):
        raise ValueError(f"{_WORDS[name]} is {value}; it is a finite number of GiB")
    if value < 0:
        raise ValueError(f"{_WORDS[name]} is {value:g} GiB; it is not below 0")
    return int(value * GIB)


def _given(values: Values, name: str) -> Any:
    value = values[name]
    if value is None:
        raise ValueError(f"{_WORDS[name]} is empty; type a number")
    return value
