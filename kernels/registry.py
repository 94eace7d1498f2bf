"""Every op that has a kernel: its launcher and reference side by side, inputs to try it on, and what it must move and do.

Importing this needs no triton; asking for a launcher does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.reference.paged_attention import paged_attention
from kernels.reference.rms_norm import rms_norm
from kernels.reference.store_kv_cache import store_kv_cache

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`|launch - reference| <= atol + rtol * |reference|`, element by element."""

    atol: float
    rtol: float


@dataclass(frozen=True, slots=True)
class KernelOp:
    """One op: `launch(**inputs)` and `reference(**inputs)` agree within `tolerances[dtype]`."""

    name: str
    reference: Callable[..., Tensor | None]
    # (dtype, device, seed=0, **sizes) -> inputs; every size has a small default.
    make_inputs: Callable[..., Inputs]
    tolerances: Mapping[torch.dtype, Tolerance]
    # inputs -> bytes that have to cross the device's memory bus once, whatever the implementation.
    bytes_moved: Callable[[Inputs], int]
    # inputs -> floating-point operations of the formula, a multiply-add being two.
    flops: Callable[[Inputs], int]

    @property
    def launch(self) -> Callable[..., Tensor | None]:
        """The Triton launcher, imported when asked for: a CPU-only machine need not have triton."""
        return getattr(importlib.import_module(f"kernels.ops.{self.name}"), self.name)


# -- inputs ------------------------------------------------------------------------------------------------------------


def make_rms_norm_inputs(
    dtype: torch.dtype, device: torch.device, seed: int = 0, *, num_tokens: int = 5, hidden: int = 123
) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    return {
        "x": torch.randn(num_tokens, hidden, dtype=dtype, device=device, generator=generator),
        "weight": torch.randn(hidden, dtype=dtype, device=device, generator=generator),
        "eps": 1e-5,
    }


def make_store_kv_cache_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 21,
    num_kv_heads: int = 3,
    head_dim: int = 80,
    block_size: int = 16,
    num_blocks: int = 5,
) -> Inputs:
    """`num_tokens` distinct slots, in no order, outside the null block."""
    generator = torch.Generator(device).manual_seed(seed)
    usable = (num_blocks - 1) * block_size
    slots = torch.randperm(usable, device=device, generator=generator)[:num_tokens] + block_size
    token_shape, cache_shape = (num_tokens, num_kv_heads, head_dim), (num_blocks, block_size, num_kv_heads, head_dim)
    return {
        "key": torch.randn(token_shape, dtype=dtype, device=device, generator=generator),
        "value": torch.randn(token_shape, dtype=dtype, device=device, generator=generator),
        "key_cache": torch.zeros(cache_shape, dtype=dtype, device=device),
        "value_cache": torch.zeros(cache_shape, dtype=dtype, device=device),
        "slot_mapping": slots,
    }


def make_paged_attention_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    query_lens: Sequence[int] = (1, 7, 0, 1, 3),
    seq_lens: Sequence[int] = (33, 7, 0, 1, 40),
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
) -> Inputs:
    """A pool that just holds `seq_lens`, the null block first and the requests' blocks scattered over the rest."""
    generator = torch.Generator(device).manual_seed(seed)
    blocks_per_request = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = 1 + sum(blocks_per_request)
    block_ids = 1 + torch.randperm(num_blocks - 1, device=device, generator=generator).to(torch.int32)
    block_table = torch.zeros(len(seq_lens), max(blocks_per_request, default=0), dtype=torch.int32, device=device)
    for request, ids in enumerate(block_ids.split(blocks_per_request)):
        block_table[request, : len(ids)] = ids
    query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device)
    cache_shape = (num_blocks, block_size, num_kv_heads, head_dim)
    query_shape = (sum(query_lens), num_heads, head_dim)
    return {
        "query": torch.randn(query_shape, dtype=dtype, device=device, generator=generator),
        "key_cache": torch.randn(cache_shape, dtype=dtype, device=device, generator=generator),
        "value_cache": torch.randn(cache_shape, dtype=dtype, device=device, generator=generator),
        "block_table": block_table,
        "query_start_loc": query_start_loc,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=device),
        "scale": head_dim**-0.5,
        "window": window,
    }


# -- what an op must move and do ---------------------------------------------------------------------------------------


def rms_norm_bytes(inputs: Inputs) -> int:
    return 2 * inputs["x"].nbytes + inputs["weight"].nbytes


def rms_norm_flops(inputs: Inputs) -> int:
    """Per element: square and add, times the row's factor, times the weight."""
    return 4 * inputs["x"].numel()


def store_kv_cache_bytes(inputs: Inputs) -> int:
    return 2 * (inputs["key"].nbytes + inputs["value"].nbytes) + inputs["slot_mapping"].nbytes


def store_kv_cache_flops(inputs: Inputs) -> int:
    return 0


def paged_attention_bytes(inputs: Inputs) -> int:
    """Query in and output out; each key and value that any row attends to once, and its block's id."""
    key_cache: Tensor = inputs["key_cache"]
    num_keys, num_blocks, block_size = 0, 0, key_cache.shape[1]
    for query_len, seq_len in _lengths(inputs):
        first = 0 if inputs["window"] is None else max(0, seq_len - query_len - inputs["window"] + 1)
        if query_len:
            num_keys += seq_len - first
            num_blocks += -(-seq_len // block_size) - first // block_size
    bytes_per_key = 2 * key_cache[0, 0].nbytes
    metadata = inputs["query_start_loc"].nbytes + inputs["seq_lens"].nbytes
    return 2 * inputs["query"].nbytes + num_keys * bytes_per_key + 4 * num_blocks + metadata


def paged_attention_flops(inputs: Inputs) -> int:
    """Two products of head_dim multiply-adds per row, head and attended position; the softmax is not counted."""
    attended = 0
    for query_len, seq_len in _lengths(inputs):
        for position in range(seq_len - query_len, seq_len):
            attended += position + 1 if inputs["window"] is None else min(position + 1, inputs["window"])
    _, num_heads, head_dim = inputs["query"].shape
    return 4 * attended * num_heads * head_dim


def _lengths(inputs: Inputs) -> list[tuple[int, int]]:
    """(query_len, seq_len) of each request."""
    return list(zip(inputs["query_start_loc"].diff().tolist(), inputs["seq_lens"].tolist(), strict=True))


# -- the ops -----------------------------------------------------------------------------------------------------------

REGISTRY: dict[str, KernelOp] = {
    op.name: op
    for op in (
        KernelOp(
            name="rms_norm",
            reference=rms_norm,
            make_inputs=make_rms_norm_inputs,
            # Two roundings to the output dtype; fp32 sums in another order.
            tolerances={
                torch.float32: Tolerance(1e-6, 1e-5),
                torch.bfloat16: Tolerance(1e-3, 1.6e-2),
                torch.float16: Tolerance(1e-4, 2e-3),
            },
            bytes_moved=rms_norm_bytes,
            flops=rms_norm_flops,
        ),
        KernelOp(
            name="store_kv_cache",
            reference=store_kv_cache,
            make_inputs=make_store_kv_cache_inputs,
            # Bytes are copied, so they are equal.
            tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
            bytes_moved=store_kv_cache_bytes,
            flops=store_kv_cache_flops,
        ),
        KernelOp(
            name="paged_attention",
            reference=paged_attention,
            make_inputs=make_paged_attention_inputs,
            # Outputs are averages of values of about 1; the weights are rounded to 8 (bfloat16) or 11 bits (float16).
            tolerances={
                torch.float32: Tolerance(1e-5, 1e-5),
                torch.bfloat16: Tolerance(2e-2, 1.6e-2),
                torch.float16: Tolerance(2e-3, 2e-3),
            },
            bytes_moved=paged_attention_bytes,
            flops=paged_attention_flops,
        ),
    )
}
