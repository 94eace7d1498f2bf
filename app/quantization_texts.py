"""The figures of the quantization lab as a person reads them, the same on the command line and on the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from app import formatting

if TYPE_CHECKING:
    from backend.experiments.ranges import GroupRange, Range

# Kinds of linear layer.
KIND_TITLES = {
    "qkv": "Queries, keys, values",
    "output": "Attention output",
    "gate_up": "Gate and up",
    "down": "Down",
}

# Column -> heading, meaning.
COLUMNS: dict[str, tuple[str, str]] = {
    "bits_per_weight": (
        "Bits per weight",
        "Of the linear layers, scales and zero points included; embedding and output head are not counted.",
    ),
    "weights_bytes": ("Weights", "All weights as they lie on the device, embedding and head included."),
    "kv_bytes_per_token": ("KV per token", "What the KV cache takes for a token, all layers together."),
    "perplexity": ("Perplexity", "exp of the mean negative log likelihood of the text's tokens. Lower is better."),
    "kl_mean": (
        "KL, nats",
        "Mean over positions of KL(reference || variant) of next-token distributions. 0: the same predictions.",
    ),
    "top1_agreement": ("Same first choice", "Share of positions where both have the same likeliest token."),
    "delta_p": (
        "Δp, %",
        "Mean change of the probability of the text's own token, in percentage points, ± its standard error.",
    ),
    "decode_1_tok_s": ("Decode ×1, tok/s", "Output tokens per second of one request with a short prompt."),
    "decode_32_tok_s": ("Decode ×32, tok/s", "Output tokens per second of 32 requests that decode together."),
    "prefill_tok_s": ("Prefill, tok/s", "Prompt tokens per second, of prompts of 512 tokens."),
    "peak_memory_bytes": (
        "Peak memory",
        "The most that this process held while speeds were measured, the reference included: allocated on the GPU, or "
        "resident on a CPU. A variant whose products are emulated has none, as it has no speeds; what its weights take "
        "stands under Weights.",
    ),
}


def value_text(name: str, row: Any) -> str:
    """A figure of a result as the matrix shows it."""
    value = row[name]
    if value is None:
        return formatting.NONE
    return _TEXTS.get(name, lambda value, row: formatting.number(value))(value, row)


def place_text(values: Range | GroupRange) -> str:
    """Where the largest of some values is: "Down, input 312", "Keys, head 2, channel 17"."""
    part = KIND_TITLES.get(values.part, values.part.capitalize())
    return ", ".join([part, *(f"{axis} {index}" for axis, index in values.outlier.items())])


def _delta_p(value: float, row: Any) -> str:
    error = row["delta_p_standard_error"]
    text = f"{value:+.2f}".replace("-", formatting.MINUS) if abs(value) >= 0.005 else "0.00"
    return text if error is None else f"{text} ± {error:.2f}"


_TEXTS: dict[str, Callable[[Any, Any], str]] = {
    "bits_per_weight": lambda value, row: f"{value:.2f}",
    "weights_bytes": lambda value, row: formatting.memory(value),
    "kv_bytes_per_token": lambda value, row: formatting.memory(value),
    "peak_memory_bytes": lambda value, row: formatting.memory(value),
    "perplexity": lambda value, row: f"{value:,.2f}" if value < 1e6 else formatting.number(value),
    "top1_agreement": lambda value, row: formatting.percent(value),
    "delta_p": _delta_p,
}
