"""Attention at long context on the heads of an 8-billion-parameter model: ours over the paged cache against torch's.

Each is timed over blocks as an engine scatters them and over blocks in order; torch's flash attention reads the same keys
and values where they lie in order, without a block table. Inputs rotate, so that no cache holds what a call reads.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.aims import ATTENTION, IN_ORDER, SCATTERED
from benchmarks.figures import Figure
from benchmarks.limits import CardLimits
from kernels.kernel_op import Inputs
from kernels.specs import paged_attention, paged_decode_attention
from kernels.timing import Call, call_seconds, rotate

HEADS: Mapping[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
DECODE_LENGTHS = (32 * 1024, 128 * 1024)
PREFILL_LENGTHS = (2048, 8192, 32 * 1024)
PEER = "torch SDPA flash"
GRAPH_S = 5e-3  # what a graph of calls should take at least
MAX_CALLS_PER_GRAPH = 20


def attention_figures(device: torch.device, limits: CardLimits) -> Iterator[Figure]:
    """Times in us, a figure for each shape and order of blocks. One that fails says why."""
    for query_len_of, lengths in ((lambda length: 1, DECODE_LENGTHS), (lambda length: length, PREFILL_LENGTHS)):
        for length in lengths:
            yield from _figures(device, limits, query_len_of(length), length)


def _figures(device: torch.device, limits: CardLimits, query_len: int, length: int) -> Iterator[Figure]:
    name = f"decode 1x{length}" if query_len == 1 else f"prefill {length}"
    try:
        inputs = paged_attention.make_inputs(torch.bfloat16, device, query_lens=[query_len], seq_lens=[length], **HEADS)
        op = paged_attention.OP
        if query_len == 1:
            op = paged_decode_attention.OP
            inputs = {name: value for name, value in inputs.items() if name not in paged_decode_attention.OF_CHUNKS}
        contiguous = inputs | {"block_table": _blocks_in_order(inputs["block_table"])}
        bytes_moved = op.bytes_moved(inputs)
        peer_us = statistics.median(_microseconds(torch_attention, torch_inputs(inputs), bytes_moved, device))
        share, limit = (bytes_moved / limits.copy_bytes_per_s, "copy")
        if query_len > 1:
            share, limit = (op.flops(inputs) / limits.matmul_flops_per_s, "matmul")
    except Exception as error:
        yield Figure(ATTENTION, name, "us", error=f"{type(error).__name__}: {error}")
        return
    for blocks, chosen in ((SCATTERED, inputs), (IN_ORDER, contiguous)):
        try:
            samples = _microseconds(op.launch, chosen, bytes_moved, device)
        except Exception as error:
            yield Figure(ATTENTION, f"{name}, {blocks}", "us", error=f"{type(error).__name__}: {error}")
            continue
        yield Figure.of(
            ATTENTION,
            f"{name}, {blocks}",
            "us",
            samples,
            peer=peer_us,
            peer_name=PEER,
            share=share / (statistics.median(samples) / 1e6),
            limit=limit,
        )


def torch_inputs(inputs: Inputs) -> Inputs:
    """Query, keys and values of one request for `torch_attention`.

    The pool's blocks, the null block left out, are the one request's keys and values as if they lay in order.
    """
    length = int(inputs["seq_lens"])
    key, value = (
        inputs[name][1:].flatten(0, 1)[:length].transpose(0, 1)[None] for name in ("key_cache", "value_cache")
    )
    return {"query": inputs["query"].transpose(0, 1)[None], "key": key, "value": value, "scale": inputs["scale"]}


def torch_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """torch's flash attention: [1, num_heads, query_len, head_dim]."""
    causal = query.shape[2] > 1  # a single row is the last position and sees all
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if query.is_cuda else SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True)


def _blocks_in_order(block_table: Tensor) -> Tensor:
    return torch.arange(1, block_table.shape[1] + 1, dtype=block_table.dtype, device=block_table.device)[None]


def _microseconds(call: Call, inputs: Inputs, bytes_moved: int, device: torch.device) -> list[float]:
    rotation = rotate(inputs, bytes_moved, device)
    once = statistics.median(call_seconds(call, rotation, device, calls_per_graph=0))
    num_calls = max(1, min(MAX_CALLS_PER_GRAPH, round(GRAPH_S / once)))
    return [seconds * 1e6 for seconds in call_seconds(call, rotation, device, calls_per_graph=num_calls)]
