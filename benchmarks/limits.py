"""What the card can do at most, measured beside the figures, and what a step of a model must move and compute."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.figures import Figure
from kernels.benchmark import PLAUSIBLE_SHARE
from kernels.timing import ONCE, call_seconds

COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True, slots=True)
class CardLimits:
    """Medians: a device-to-device copy of 1 GiB, bytes read and written; a square matmul of random values, size 8192.

    Attributes:
        read_bytes_per_s: of a sum of 1 GiB or of the copy, whichever is faster. Shares are of the copy; what nothing can
            exceed is this.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    read_bytes_per_s: float


def measure_limits(device: torch.device) -> CardLimits:
    """Measure all in the dtype that the engine uses there by default (bfloat16 on CUDA, float32 on the CPU)."""
    copy = _copy_rate(device)
    limits = CardLimits(copy, _matmul_rate(device), max(copy, _sum_rate(device)))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a model is loaded next
    return limits


def believable(figures: Iterable[Figure], limits: CardLimits) -> tuple[list[Figure], list[str]]:
    """The figures, those left without numbers that cannot be, and a line for each of these."""
    believed, lines = [], []
    for figure in figures:
        problem = _implausible(figure, limits)
        if problem is not None:
            lines.append(f"{figure.model}, {figure.name}: {problem}")
            figure = Figure(figure.model, figure.name, figure.unit, error=problem)
        believed.append(figure)
    return believed, lines


def _implausible(figure: Figure, limits: CardLimits) -> str | None:
    """Why a figure cannot be: its median is above `PLAUSIBLE_SHARE` of what the card reads or multiplies. None if it can."""
    if figure.share is None:
        return None
    if figure.limit == "copy":
        rate, limit = figure.share * limits.copy_bytes_per_s, limits.read_bytes_per_s
        words = f"{rate / 1e9:,.0f} GB/s cannot be: this machine was measured at {limit / 1e9:,.0f} GB/s it reads"
    else:
        rate, limit = figure.share * limits.matmul_flops_per_s, limits.matmul_flops_per_s
        words = f"{rate / 1e12:,.2f} TFLOP/s cannot be: this machine was measured at {limit / 1e12:,.2f} TFLOP/s it multiplies"
    if rate <= PLAUSIBLE_SHARE * limit:
        return None
    return f"{words} at most, so the timing, or what the figure is taken to move or compute, is wrong"


def _copy_rate(device: torch.device) -> float:
    num_bytes = COPY_BYTES[device.type]
    source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_s(lambda: target.copy_(source), device)


def _sum_rate(device: torch.device) -> float:
    num_bytes = COPY_BYTES[device.type]
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    total = torch.zeros((), dtype=torch.float32, device=device)
    return num_bytes / _median_s(lambda: torch.sum(source, dim=0, out=total), device)


def _matmul_rate(device: torch.device) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = MATMUL_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    output = torch.empty_like(left)
    return 2 * size**3 / _median_s(lambda: torch.mm(left, right, out=output), device)


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    return statistics.median(call_seconds(call, ONCE, device, calls_per_graph=0))


def linear_parameters(model: Mapping[str, Any]) -> int:
    """Weights of the layers' linears.

    Args:
        model: `EngineInfo.model`, the fields of `DecoderConfig` among them.
    """
    query_size, kv_size = model["num_heads"] * model["head_dim"], model["num_kv_heads"] * model["head_dim"]
    attention = 2 * model["hidden_size"] * (query_size + kv_size)
    return model["num_layers"] * (attention + 3 * model["hidden_size"] * model["intermediate_size"])


def decode_bytes(
    model: Mapping[str, Any], element_bytes: int, kv_bytes_per_token: int, num_requests: int, mean_context: float
) -> float:
    """Bytes that a decode step cannot but read: linears and head once, and the keys and values of all requests."""
    head = model["vocab_size"] * model["hidden_size"]
    weights = element_bytes * (linear_parameters(model) + head)
    return weights + num_requests * mean_context * kv_bytes_per_token


def layer_and_head_bytes(model: Mapping[str, Any], element_bytes: int, weights_bytes: int) -> int:
    """Of all weights, those that a step reads whole: without an embedding that is not the head too.

    Args:
        element_bytes: of a weight of the embedding, which no method makes smaller.
        weights_bytes: `EngineInfo.load`'s, in whatever format the layers are.
    """
    embedding = 0 if model["tie_word_embeddings"] else model["vocab_size"] * model["hidden_size"] * element_bytes
    return weights_bytes - embedding


def prefill_flops(model: Mapping[str, Any], num_requests: int, prompt_len: int) -> int:
    """FLOPs of computing prompts: the linears for every token, and causal attention. The head, once a prompt, is left out."""
    linears = 2 * linear_parameters(model) * prompt_len
    pairs = prompt_len * (prompt_len + 1) // 2
    attention = 4 * model["num_layers"] * model["num_heads"] * model["head_dim"] * pairs
    return num_requests * (linears + attention)
