"""Attention of one query row per request over the paged KV cache, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.paged_attention import paged_attention


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Attend from the last position of each request to all of it: `paged_attention` with one query row per request.

    `out[r, h] = softmax_j(scale * query[r, h] . k[j, h // group]) v[j, h // group]`, over the positions
    `max(0, seq_lens[r] - window) <= j < seq_lens[r]` of request r (from 0 without a window).

    Args:
        query: float [num_reqs, num_heads, head_dim]
        key_cache: query.dtype [num_blocks, block_size, num_kv_heads, head_dim], contiguous. With scales what `quantize`
            of `kv_quantization` gives: int8, float8_e4m3fn, or uint8 with half as many columns
        value_cache: as key_cache
        block_table: int32 [num_reqs, max_num_blocks]; entries past a request's blocks or behind its window must be
            valid ids (the null block), but are not used
        seq_lens: int32 [num_reqs]; 0 for a padding row, whose output is 0
        scale: factor of the scores, usually head_dim ** -0.5
        window: positions a row attends to, its own included; None for all
        key_scales: float16 [num_blocks, block_size, num_kv_heads, 1], for uint8 [..., 2], contiguous
        value_scales: as key_scales
    Returns:
        query.dtype [num_reqs, num_heads, head_dim]. Nothing is mutated.
    """
    rows = seq_lens.nonzero()[:, 0]
    query_start_loc = torch.arange(len(rows) + 1, dtype=torch.int32, device=query.device)
    attended = paged_attention(
        query[rows],
        key_cache,
        value_cache,
        block_table[rows],
        query_start_loc,
        seq_lens[rows],
        scale,
        window,
        key_scales,
        value_scales,
    )
    return torch.zeros_like(query).index_copy_(0, rows, attended)
