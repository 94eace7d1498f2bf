"""Causal attention over the paged KV cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.kv_quantization import DTYPES, quantize
from kernels.reference.paged_attention import paged_attention

SHAPES: dict[str, dict[str, Any]] = {
    "decode 64 at 1024, 32/8 x 128": {
        "query_lens": [1] * 64,
        "seq_lens": [1024] * 64,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
    },
    "prefill 2048 at 2048, 32/8 x 128": {
        "query_lens": [2048],
        "seq_lens": [2048],
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
    },
    "trees 8 of 26 at 512, 9/3 x 64": {"query_lens": [26] * 8, "seq_lens": [512] * 8, "trees": range(8)},
    "decode 8 at 512, 9/3 x 64": {"query_lens": [1] * 8, "seq_lens": [512] * 8},
}


def make_inputs(
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
    kv_dtype: str | None = None,
    trees: Sequence[int] = (),
) -> Inputs:
    """A pool that just holds `seq_lens`, the null block first and the requests' blocks scattered over the rest.

    Args:
        kv_dtype: of a quantized pool, "int8", "fp8_e4m3" or "int4"; None: `dtype`, without scales.
        trees: requests whose rows, 64 at most, are the nodes of a random tree each; none: there is no mask.
    """
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
    query = torch.randn(query_shape, dtype=dtype, device=device, generator=generator)
    key_cache, value_cache = (
        torch.randn(cache_shape, dtype=dtype, device=device, generator=generator) for _ in range(2)
    )
    key_scales = value_scales = None
    if kv_dtype is not None:
        key_cache, key_scales = quantize(key_cache, DTYPES[kv_dtype])
        value_cache, value_scales = quantize(value_cache, DTYPES[kv_dtype])
    return {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": block_table,
        "query_start_loc": query_start_loc,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=device),
        "scale": head_dim**-0.5,
        "window": window,
        "key_scales": key_scales,
        "value_scales": value_scales,
        **_tree_inputs(query_lens, seq_lens, trees, device, seed),
    }


def _tree_inputs(
    query_lens: Sequence[int], seq_lens: Sequence[int], trees: Sequence[int], device: torch.device, seed: int
) -> Inputs:
    if not trees:
        return {"tree_mask": None, "tree_starts": None}
    draws = random.Random(seed)
    masks: list[int] = []
    for request, query_len in enumerate(query_lens):
        bits = [1]
        while len(bits) < query_len and request in trees:
            bits.append(draws.choice(bits) | 1 << len(bits))
        masks += bits[:query_len] if request in trees else [-1] * query_len
    # Of 64 bits the last is a sign.
    signed = [bits - (bits >> 63 << 64) if bits > 0 else bits for bits in masks]
    starts = [seq_len - query_len for query_len, seq_len in zip(query_lens, seq_lens, strict=True)]
    return {
        "tree_mask": torch.tensor(signed, dtype=torch.int64, device=device),
        "tree_starts": torch.tensor(starts, dtype=torch.int32, device=device),
    }


def bytes_moved(inputs: Inputs) -> int:
    """Query in and output out; each key and value that any row attends to once, and its block's id."""
    key_cache: Tensor = inputs["key_cache"]
    num_keys, num_blocks, block_size = 0, 0, key_cache.shape[1]
    for query_len, seq_len in _lengths(inputs):
        first = 0 if inputs["window"] is None else max(0, seq_len - query_len - inputs["window"] + 1)
        if query_len:
            num_keys += seq_len - first
            num_blocks += -(-seq_len // block_size) - first // block_size
    bytes_per_key = bytes_per_token(inputs)
    lengths = ("query_start_loc", "seq_lens", "tree_mask", "tree_starts")
    metadata = sum(inputs[name].nbytes for name in lengths if inputs[name] is not None)
    return 2 * inputs["query"].nbytes + num_keys * bytes_per_key + 4 * num_blocks + metadata


def bytes_per_token(inputs: Inputs) -> int:
    """One token's keys and values in all heads, with their scales."""
    kept = (inputs[name] for name in ("key_cache", "value_cache", "key_scales", "value_scales"))
    return sum(tensor[0, 0].nbytes for tensor in kept if tensor is not None)


def flops(inputs: Inputs) -> int:
    """Two products of head_dim multiply-adds per row, head and attended position; the softmax is not counted."""
    attended, row = 0, 0
    masks = None if inputs["tree_mask"] is None else inputs["tree_mask"].tolist()
    for r, (query_len, seq_len) in enumerate(_lengths(inputs)):
        for position in range(seq_len - query_len, seq_len):
            num_seen = position + 1
            if masks is not None and masks[row] != -1:
                num_seen = int(inputs["tree_starts"][r]) + (masks[row] % 2**64).bit_count()
            attended += num_seen if inputs["window"] is None else min(num_seen, inputs["window"])
            row += 1
    _, num_heads, head_dim = inputs["query"].shape
    return 4 * attended * num_heads * head_dim


def _lengths(inputs: Inputs) -> list[tuple[int, int]]:
    """(query_len, seq_len) of each request."""
    return list(zip(inputs["query_start_loc"].diff().tolist(), inputs["seq_lens"].tolist(), strict=True))


OP = KernelOp(
    name="paged_attention",
    reference=paged_attention,
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
