"""Attention of one query row per request over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.paged_decode_attention import paged_decode_attention
from kernels.specs import paged_attention

_LARGE: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "1 at 1024, 32/8 x 128": _LARGE | {"seq_lens": [1024]},
    "1 at 32768, 32/8 x 128": _LARGE | {"seq_lens": [32768]},
    "64 at 1024, 32/8 x 128": _LARGE | {"seq_lens": [1024] * 64},
    "64 at 1024, 32/8 x 128, int8": _LARGE | {"seq_lens": [1024] * 64, "kv_dtype": "int8"},
    "64 at 1024, 32/8 x 128, fp8_e4m3": _LARGE | {"seq_lens": [1024] * 64, "kv_dtype": "fp8_e4m3"},
    "64 at 1024, 32/8 x 128, int4": _LARGE | {"seq_lens": [1024] * 64, "kv_dtype": "int4"},
    "64 at 1 to 4096, 32/8 x 128": _LARGE | {"seq_lens": list(range(1, 4096, 64))},
    "8 at 512, 9/3 x 64": {"seq_lens": [512] * 8},
}

# What `paged_attention` takes and this op does not: a request has one row here.
OF_CHUNKS = ("query_start_loc", "tree_mask", "tree_starts")


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    seq_lens: Sequence[int] = (33, 0, 1, 150, 16),
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
    kv_dtype: str | None = None,
) -> Inputs:
    """The pool of `paged_attention`, of which each request's last position is asked for."""
    inputs = paged_attention.make_inputs(
        dtype,
        device,
        seed,
        query_lens=[1] * len(seq_lens),
        seq_lens=seq_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        kv_dtype=kv_dtype,
    )
    return {name: value for name, value in inputs.items() if name not in OF_CHUNKS}


def bytes_moved(inputs: Inputs) -> int:
    """Query in and output out; each key and value that is attended to once, and its block's id."""
    key_cache, window = inputs["key_cache"], inputs["window"]
    num_keys, num_blocks, block_size = 0, 0, key_cache.shape[1]
    for seq_len in inputs["seq_lens"].tolist():
        first = 0 if window is None else max(0, seq_len - window)
        num_keys += seq_len - first
        num_blocks += -(-seq_len // block_size) - first // block_size
    bytes_per_key = paged_attention.bytes_per_token(inputs)
    return 2 * inputs["query"].nbytes + num_keys * bytes_per_key + 4 * num_blocks + inputs["seq_lens"].nbytes


def flops(inputs: Inputs) -> int:
    """Two products of head_dim multiply-adds per head and attended position; the softmax is not counted."""
    window = inputs["window"]
    attended = sum(length if window is None else min(length, window) for length in inputs["seq_lens"].tolist())
    _, num_heads, head_dim = inputs["query"].shape
    return 4 * attended * num_heads * head_dim


OP = KernelOp(
    name="paged_decode_attention",
    reference=paged_decode_attention,
    make_inputs=make_inputs,
    # Outputs are averages of values of about 1; the weights, and quantized values, are rounded to 8 (bfloat16) or 11 bits
    # (float16).
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5),
        torch.bfloat16: Tolerance(2e-2, 1.6e-2),
        torch.float16: Tolerance(2e-3, 2e-3),
    },
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
