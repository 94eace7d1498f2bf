"""The Sizing page's figures: headline, the card as a bar, the arithmetic, and what other dtypes and layouts would take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.components import figures, notes, palette, sizing_charts, sizing_form
from app.components import sizing_state as state
from app.components.bars import Share, share_bar
from app.components.sizing_figures import (
    DtypeRow,
    LayoutRow,
    OnCard,
    Sizing,
    compare_dtypes,
    compare_layouts,
)
from app.components.sizing_models import SizedModel
from backend.analysis.kv_size import count_of, misquoted_llama_3_8b
from backend.analysis.memory import CardMemory

_KINDS = {
    "MHA": "a key and a value for each query head",
    "GQA": "query heads share a key and a value in groups",
    "MQA": "all query heads share one key and one value",
    "MLA": "one latent and one rotated key for all heads",
}

_EXPLANATION = r"""
To compute its next token a model attends to the keys and values of all tokens before it; the KV cache keeps them, so that
they are computed once. A layer keeps one key and one value per token and KV head. Fewer KV heads than query heads (GQA), a
compressed latent in their place (MLA), layers that look back over a window only, and fewer bits per value make it smaller.
What the card has left beside the weights and the activations of a step is cut into blocks, and a request holds as many as
its tokens need: that decides how many requests can run at once. A contiguous cache must reserve the longest length that is
allowed for every request instead, most of which is never used.

$$\text{bytes per token} = 2 \times \text{layers} \times \text{KV heads} \times \text{head size} \times \text{bytes per value}$$

Ainslie et al.: *GQA*, 2023. DeepSeek-AI: *DeepSeek-V2* (MLA), 2024. Kwon et al.: *Efficient Memory Management for Large
Language Model Serving with PagedAttention*, 2023.
"""


def show(model: SizedModel, values: Mapping[str, Any], sizing: Sizing) -> None:
    _headline(sizing)
    _remarks(model, values, sizing)
    if sizing.weights_problem:
        problem = f"What fits the card is not known: {sizing.weights_problem}. Its size can be typed under Advanced."
        st.error(notes.plain(problem), icon=":material/error:")
    if sizing.on_card:
        _card(values, sizing, sizing.on_card)
    with st.container(key="sizing-chart"):
        room = sizing.on_card.memory.kv_bytes if sizing.on_card else None
        st.altair_chart(sizing_charts.kv_over_length(sizing.kv, sizing.length, room))
    if values[state.MODEL] == "Llama-3-8B":
        _misquoted()
    _arithmetic(sizing)
    _dtypes(compare_dtypes(model.config, values, sizing))
    _layouts(values, sizing)


def explanation() -> None:
    with st.expander("What am I looking at?", icon=":material/help:"):
        st.markdown(_EXPLANATION)


def _headline(sizing: Sizing) -> None:
    kv, weights, on_card = sizing.kv, sizing.weights, sizing.on_card
    with figures.row():
        figures.figure(
            "KV per token",
            formatting.memory(kv.bytes_per_token),
            f"Keys and values of one token in all layers. {kv.shape.kind}: {_KINDS[kv.shape.kind]}.",
            f"{kv.shape.kind}, {kv.dtype}",
        )
        figures.figure(
            "KV per request",
            formatting.memory(sizing.request.num_bytes),
            "Of a request at its full length, prompt and output, without the rounding up to blocks.",
            f"{formatting.count(sizing.length)} tokens",
        )
        figures.figure(
            "Weights",
            formatting.memory(weights.num_bytes if weights else None),
            "All weights in the chosen dtype, by the model's config.",
            f"{formatting.number(weights.model.parameters().total / 1e9)} B weights"
            if weights and weights.model
            else None,
        )
        figures.figure(
            "Requests that fit",
            formatting.count(on_card.fit.num_requests if on_card else None),
            "At their full length, all at once, in whole blocks. Running requests are shorter on average, so more may run "
            "before one has to wait.",
            f"of {formatting.count(sizing.length)} tokens",
        )
        figures.figure(
            "Longest context",
            _longest(on_card),
            "Tokens, prompt and output together, of one request that has the card to itself.",
            _limit(on_card),
        )


def _longest(on_card: OnCard | None) -> str:
    if on_card is None:
        return formatting.NONE
    tokens = on_card.longest.num_tokens
    return "any" if tokens is None else formatting.count(tokens)


def _limit(on_card: OnCard | None) -> str | None:
    match on_card.longest.limited_by if on_card else None:
        case "memory":
            return "set by memory"
        case "max_position_embeddings":
            return "the model's limit"
    return None


def _remarks(model: SizedModel, values: Mapping[str, Any], sizing: Sizing) -> None:
    """Where the inputs are from, and what in them asks for caution."""
    sources = [f"Model: {model.source}."]
    if values[state.CARD] != state.TYPED:
        sources.append(f"Card: {sizing_form.card_source(values[state.CARD])}.")
    if sizing.weights and sizing.weights.model and sizing.weights.model.not_counted:
        sources.append(f"Not counted: {', '.join(sizing.weights.model.not_counted)}.")
    if sizing.kv.shape.checkpoint_dtype is None and "auto" in (values[state.KV_DTYPE], values[state.WEIGHT_DTYPE]):
        sources.append("The config names no dtype; auto takes bfloat16.")
    if model.config.get("quantization_config") and values[state.WEIGHT_DTYPE] == "auto":
        sources.append("The checkpoint is quantized, which auto does not see: choose a weight dtype.")
    st.caption(notes.plain(" ".join(sources)))
    positions = sizing.kv.shape.max_position_embeddings
    if positions is not None and sizing.length > positions:
        st.warning(
            notes.plain(
                f"A request of {formatting.count(sizing.length)} tokens is longer than the model's "
                f"max_position_embeddings, {formatting.count(positions)}."
            ),
            icon=":material/warning:",
        )


def _card(values: Mapping[str, Any], sizing: Sizing, on_card: OnCard) -> None:
    memory = on_card.memory
    needed = memory.weight_bytes + memory.activation_bytes
    title = sizing_form.card_text(values)
    parts = [
        ("weights", memory.weight_bytes, palette.WEIGHTS),
        ("activations", memory.activation_bytes, palette.PREFILL),
    ]
    if memory.kv_bytes > 0:
        parts += [
            ("KV cache", memory.kv_bytes, palette.IN_USE),
            ("unused", memory.card_bytes - memory.share_bytes, palette.FREE),
        ]
        total = f"{formatting.percent(memory.gpu_memory_utilization)} may be used"
    else:
        total = f"{formatting.memory(needed)} needed, {formatting.memory(memory.share_bytes)} may be used"
    share_bar(title, [Share(name, size, formatting.memory(size), colour) for name, size, colour in parts], total)
    if memory.kv_bytes <= 0:
        st.error(
            notes.plain(
                f"No KV cache fits: weights and reserve take {formatting.memory(needed)}, and "
                f"{formatting.percent(memory.gpu_memory_utilization)} of the card are "
                f"{formatting.memory(memory.share_bytes)}. {_remedy(memory)}"
                if needed >= memory.share_bytes
                else f"No KV cache fits: the null block, of {formatting.count(memory.blocks.block_size)} tokens, takes "
                f"{formatting.memory(memory.blocks.bytes_per_block)}, and {formatting.memory(memory.share_bytes - needed)} "
                "are left beside weights and reserve. Choose a smaller block size."
            ),
            icon=":material/error:",
        )
    elif on_card.fit.num_requests == 0:
        st.warning(
            notes.plain(
                f"Not one request of {formatting.count(sizing.length)} tokens fits: it takes "
                f"{formatting.memory(on_card.fit.bytes_per_request)}, and {formatting.memory(memory.kv_bytes)} are left."
            ),
            icon=":material/warning:",
        )


def _remedy(memory: CardMemory) -> str:
    """A smaller dtype or other cards; how many, where each holds its part of the weights and its own activations."""
    each = memory.share_bytes - memory.activation_bytes
    many = f", or at least {count_of(-(-memory.weight_bytes // each), 'card')} like this one" if each > 0 else ""
    return f"Choose a smaller weight dtype or a larger card{many}."


def _misquoted() -> None:
    st.markdown("**2.5 MB a token? Where that figure is from**")
    st.code(misquoted_llama_3_8b(), language=None, wrap_lines=True)


def _arithmetic(sizing: Sizing) -> None:
    st.subheader("Where each number comes from", anchor=False)
    rows = {"KV per token": f"{sizing.kv.arithmetic} bytes", "KV per request": sizing.request.arithmetic}
    rows["KV block"] = f"{sizing.kv.blocks(sizing.block_size).arithmetic} bytes"
    if sizing.weights and sizing.weights.totals:
        rows["Weights"] = f"{sizing.weights.totals.arithmetic[-1].removeprefix('total: ')} bytes"
    elif sizing.weights:
        rows["Weights"] = f"{formatting.count(sizing.weights.num_bytes)} bytes, as typed in"
    if sizing.on_card:
        rows["KV cache"] = sizing.on_card.memory.arithmetic
        rows["Requests that fit"] = sizing.on_card.fit.arithmetic
        rows["Longest context"] = sizing.on_card.longest.arithmetic
    lines = [f"| {name} | {notes.plain(line)} |" for name, line in rows.items()]
    st.markdown("\n".join(["| Figure | Arithmetic |", "| --- | --- |", *lines]))
    if sizing.weights and sizing.weights.model and sizing.weights.totals:
        with st.expander("Weights, part by part"):
            counts = sizing.weights.model.parameters().arithmetic
            st.code("\n".join([*counts, "", *sizing.weights.totals.arithmetic]), language=None, wrap_lines=True)


def _dtypes(rows: list[DtypeRow]) -> None:
    st.subheader("KV dtypes compared", anchor=False)
    table = [
        {
            "KV dtype": f"auto ({row.kv.dtype})" if row.dtype == "auto" and row.kv else row.dtype,
            "Bytes per token": formatting.count(row.kv.bytes_per_token) if row.kv else formatting.NONE,
            "Factor": formatting.NONE if row.factor is None else f"×{formatting.number(row.factor)}",
            "KV per request": formatting.memory(row.request_bytes),
            "Requests that fit": formatting.count(row.on_card.fit.num_requests if row.on_card else None),
            "Longest context": _longest(row.on_card),
        }
        for row in rows
    ]
    st.dataframe(pd.DataFrame(table), hide_index=True, lazy=False, height="content", key="sizing-dtypes")
    st.caption(
        "fp8_e4m3 and int8 carry a 2-byte scale for each key and each value of a token and KV head, int4 a scale and a "
        "minimum: that is why eight bits are not quite half of sixteen."
    )
    for row in rows:
        if row.problem:
            st.caption(notes.plain(f"{row.dtype}: {row.problem}."))


def _layouts(values: Mapping[str, Any], sizing: Sizing) -> None:
    st.subheader("Paged against contiguous", anchor=False)
    try:
        layouts = compare_layouts(values, sizing)
    except ValueError as error:
        st.info(notes.plain(f"Nothing to compare: {error}."), icon=":material/view_week:")
        return
    names = {
        f"contiguous, {layouts.max_model_len:,} tokens each": layouts.contiguous,
        f"paged, blocks of {sizing.block_size:,} tokens": layouts.paged,
    }
    st.dataframe(
        pd.DataFrame([{"Layout": name, **_layout_row(row)} for name, row in names.items()]),
        hide_index=True,
        lazy=False,
        height="content",
        key="sizing-layouts",
    )
    if layouts.arithmetic is None:
        st.caption(
            "A layer with a window reserves its window alone; blocks that no token in reach is in are given back."
        )
    elif layouts.num_requests:
        lines = [
            f"contiguous: {layouts.arithmetic.contiguous.arithmetic}",
            f"paged:      {layouts.arithmetic.paged.arithmetic}",
        ]
        st.caption(f"In slots of one token, for {count_of(layouts.num_requests, 'request')} of this length:")
        st.code("\n".join(lines), language=None, wrap_lines=True)


def _layout_row(row: LayoutRow) -> dict[str, str]:
    return {
        "Reserved per request": formatting.memory(row.reserved_bytes),
        "Never used": formatting.percent(row.unused_share),
        "Requests that fit": formatting.count(row.num_requests),
    }
