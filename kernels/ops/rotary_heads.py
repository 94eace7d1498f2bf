"""A token's heads out of the QKV product, normalised and rotated by its position. Not an op: device functions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed_halves(
    left,
    right,
    q_norm_weight_ptr,
    k_norm_weight_ptr,
    eps,
    is_query,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """fp32 halves of heads, [heads, BLOCK_HALF] and 0 past half a head, each head divided by its root mean square."""
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_HALF)
    mask = column < HALF
    q_left = tl.load(q_norm_weight_ptr + column, mask=mask, other=0.0)[None, :]
    q_right = tl.load(q_norm_weight_ptr + HALF + column, mask=mask, other=0.0)[None, :]
    k_left = tl.load(k_norm_weight_ptr + column, mask=mask, other=0.0)[None, :]
    k_right = tl.load(k_norm_weight_ptr + HALF + column, mask=mask, other=0.0)[None, :]
    weight_left = tl.where(is_query, q_left, k_left)
    weight_right = tl.where(is_query, q_right, k_right)
    mean_square = (tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / HEAD_DIM
    root = tl.sqrt(mean_square + eps)[:, None]
    # Rounded to the weights' dtype before the product and after it, as the reference does.
    left = (left / root).to(weight_left.dtype).to(tl.float32) * weight_left.to(tl.float32)
    right = (right / root).to(weight_right.dtype).to(tl.float32) * weight_right.to(tl.float32)
    return left.to(weight_left.dtype).to(tl.float32), right.to(weight_right.dtype).to(tl.float32)


@triton.jit
def rotated_heads(
    qkv_ptr,
    positions_ptr,
    cos_sin_cache_ptr,
    slot_mapping_ptr,
    q_norm_weight_ptr,
    k_norm_weight_ptr,
    eps,
    token,
    head,
    stride_qkv_token,
    stride_cos_sin_cache_position,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """The halves of a token's heads, qkv's dtype [heads, BLOCK_HALF], those of q and k rotated, and its slot."""
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_HALF)
    column_mask = column < HALF
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & column_mask[None, :]
    left_ptr = qkv_ptr + token * stride_qkv_token + (head * HEAD_DIM)[:, None] + column[None, :]
    left = tl.load(left_ptr, mask=mask, other=0.0)
    right = tl.load(left_ptr + HALF, mask=mask, other=0.0)
    # int64, and strides are multiplied by it: a pool passes 2^31 elements.
    slot = tl.load(slot_mapping_ptr + token)
    cos_ptr = cos_sin_cache_ptr + tl.load(positions_ptr + token) * stride_cos_sin_cache_position + column
    cos = tl.load(cos_ptr, mask=column_mask, other=0.0)[None, :]
    sin = tl.load(cos_ptr + HALF, mask=column_mask, other=0.0)[None, :]

    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    if QK_NORM:
        is_query = (head < NUM_HEADS)[:, None]
        wide_left, wide_right = _normed_halves(
            wide_left, wide_right, q_norm_weight_ptr, k_norm_weight_ptr, eps, is_query, HEAD_DIM, BLOCK_HALF
        )
    is_rotated = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    # Not by an angle of zero: inf * 0 is NaN, and a value must arrive as it is.
    left = tl.where(is_rotated, (wide_left * cos - wide_right * sin).to(left.dtype), left)
    right = tl.where(is_rotated, (wide_right * cos + wide_left * sin).to(right.dtype), right)
    return left, right, slot
