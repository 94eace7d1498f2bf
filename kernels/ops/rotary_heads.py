"""A token's heads out of the QKV product, rotated by its position. Not an op: a device function."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated_heads(
    qkv_ptr,
    positions_ptr,
    cos_sin_cache_ptr,
    slot_mapping_ptr,
    token,
    head,
    stride_qkv_token,
    stride_cos_sin_cache_position,
    NUM_ROTATED: tl.constexpr,
    NUM_ALL_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """The halves of a token's heads, qkv's dtype [heads, BLOCK_HALF], the first NUM_ROTATED of them rotated, and its slot."""
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_HALF)
    column_mask = column < HALF
    mask = (head < NUM_ALL_HEADS)[:, None] & column_mask[None, :]
    left_ptr = qkv_ptr + token * stride_qkv_token + (head * HEAD_DIM)[:, None] + column[None, :]
    left = tl.load(left_ptr, mask=mask, other=0.0)
    right = tl.load(left_ptr + HALF, mask=mask, other=0.0)
    # int64, and strides are multiplied by it: a pool passes 2^31 elements.
    slot = tl.load(slot_mapping_ptr + token)
    cos_ptr = cos_sin_cache_ptr + tl.load(positions_ptr + token) * stride_cos_sin_cache_position + column
    cos = tl.load(cos_ptr, mask=column_mask, other=0.0)[None, :]
    sin = tl.load(cos_ptr + HALF, mask=column_mask, other=0.0)[None, :]

    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    is_rotated = (head < NUM_ROTATED)[:, None]
    # Not by an angle of zero: inf * 0 is NaN, and a value must arrive as it is.
    left = tl.where(is_rotated, (wide_left * cos - wide_right * sin).to(left.dtype), left)
    right = tl.where(is_rotated, (wide_right * cos + wide_left * sin).to(right.dtype), right)
    return left, right, slot
