"""What the card can do at most, measured beside the figures, and what a step of a model must move and compute."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.timing import ONCE, call_seconds

COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True, slots=True)
class CardLimits:
    """Medians: a device-to-device copy of 1 GiB, bytes read and written; a square matmul of random values, size 8192."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float


def measure_limits(device: torch.device) -> CardLimits:
    """Measure both limits in the dtype that the engine uses there by default (bfloat16 on CUDA, float32 on the CPU)."""
    limits = CardLimits(_copy_rate(device), _matmul_rate(device))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a model is loaded next
    return limits


def _copy_rate(device: torch.device) -> float:
    num_bytes = COPY_BYTES[device.type]
    source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return (
        2 * num_bytes / statistics.median(call_seconds(lambda: target.copy_(source), ONCE, device, calls_per_graph=0))
    )


def _matmul_rate(device: torch.device) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = MATMUL_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    output = torch.empty_like(left)
    return (
        2
        * size**3
        / statistics.median(call_seconds(lambda: torch.mm(left, right, out=output), ONCE, device, calls_per_graph=0))
    )


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


def prefill_flops(model: Mapping[str, Any], num_requests: int, prompt_len: int) -> int:
    """FLOPs of computing prompts: the linears for every token, and causal attention. The head, once a prompt, is left out."""
    linears = 2 * linear_parameters(model) * prompt_len
    pairs = prompt_len * (prompt_len + 1) // 2
    attention = 4 * model["num_layers"] * model["num_heads"] * model["head_dim"] * pairs
    return num_requests * (linears + attention)
