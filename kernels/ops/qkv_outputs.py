"""The end of a QKV product's kernel, in halves: rotation, queries, and the cache. Not an op: device functions and checks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_tensor


@triton.jit
def load_angles(
    cos_sin_cache_ptr, positions_ptr, token, pair, mask, token_mask, stride_position, HALF_DIM: tl.constexpr
):
    """Cosines and sines of tokens' positions, fp32 [tokens, pairs]; 0 where `mask` is not set."""
    position = tl.load(positions_ptr + token, mask=token_mask, other=0)
    angle_ptrs = cos_sin_cache_ptr + (position * stride_position)[:, None] + pair[None, :]
    return tl.load(angle_ptrs, mask=mask, other=0.0), tl.load(angle_ptrs + HALF_DIM, mask=mask, other=0.0)


@triton.jit
def rotate_and_store(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    left,
    right,
    cos,
    sin,
    slot,
    token,
    pair,
    mask,
    head,
    stride_query_token,
    stride_key_cache_block,
    stride_key_cache_slot,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_slot,
    stride_value_cache_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Pairs (i, HEAD_DIM / 2 + i) of one head as fp32 [tokens, pairs], rounded once: to the queries, or to tokens' slots."""
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    if head < NUM_HEADS + NUM_KV_HEADS:
        rotated = left * cos - right * sin
        right = right * cos + left * sin
        left = rotated
    dtype = query_ptr.dtype.element_ty
    if head < NUM_HEADS:
        query_ptrs = query_ptr + token[:, None].to(tl.int64) * stride_query_token + head * HEAD_DIM + pair[None, :]
        tl.store(query_ptrs, left.to(dtype), mask=mask)
        tl.store(query_ptrs + HALF_DIM, right.to(dtype), mask=mask)
    else:
        block_id, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        if head < NUM_HEADS + NUM_KV_HEADS:
            kv_head = head - NUM_HEADS
            key_offset = block_id * stride_key_cache_block + offset * stride_key_cache_slot
            key_ptrs = key_cache_ptr + (key_offset + kv_head * stride_key_cache_head)[:, None] + pair[None, :]
            tl.store(key_ptrs, left.to(dtype), mask=mask)
            tl.store(key_ptrs + HALF_DIM, right.to(dtype), mask=mask)
        else:
            kv_head = head - NUM_HEADS - NUM_KV_HEADS
            value_offset = block_id * stride_value_cache_block + offset * stride_value_cache_slot
            value_ptrs = value_cache_ptr + (value_offset + kv_head * stride_value_cache_head)[:, None] + pair[None, :]
            tl.store(value_ptrs, left.to(dtype), mask=mask)
            tl.store(value_ptrs + HALF_DIM, right.to(dtype), mask=mask)


def check_heads(
    num_rows: int,
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> int:
    """How many heads the queries have in a weight of `num_rows`.

    Raises ValueError as `check_tensor`, and where head_dim is odd or rows are no number of heads that leaves any for queries.
    """
    check_tensor("key_cache", key_cache, (None, None, None, None), dtype, device)
    check_tensor("value_cache", value_cache, tuple(key_cache.shape), dtype, device)
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_heads = num_rows // head_dim - 2 * num_kv_heads
    if num_heads < 1 or num_rows % head_dim or head_dim % 2:
        raise ValueError(
            f"weight has {num_rows} rows, which is no number of heads of {head_dim} beside {num_kv_heads} key and "
            "value heads, or head_dim is odd"
        )
    check_tensor("positions", positions, (num_tokens,), torch.int64, device)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, device)
    check_tensor("cos_sin_cache", cos_sin_cache, (None, head_dim), torch.float32, device)
    return num_heads
