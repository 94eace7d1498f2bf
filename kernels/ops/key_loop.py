"""The loop of `paged_attention` over keys: an online softmax. Not an op: device functions."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.kv_quantization import load_keys_and_values


@triton.jit
def key_share(begin, end, split, NUM_SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of keys from `begin` up to `end`, where share number `split` begins and ends, and how many there are.

    They are of equal length, at most NUM_SPLITS, and none but the last is shorter than MIN_KEYS.
    """
    num_shares = 1
    if NUM_SPLITS > 1:
        num_keys = tl.maximum((end - begin + NUM_SPLITS - 1) // NUM_SPLITS, MIN_KEYS)
        num_keys = (num_keys + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        num_shares = tl.maximum((end - begin + num_keys - 1) // num_keys, 1)
        begin += split * num_keys
        end = tl.minimum(begin + num_keys, end)
    return begin, end, num_shares


@triton.jit
def load_block_ids(block_ids_ptr, begin, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of the BLOCK_N keys from place `begin` on, up to `end`."""
    place = begin + tl.arange(0, BLOCK_N)
    return tl.load(block_ids_ptr + place // BLOCK_SIZE, mask=place < end, other=0)


@triton.jit
def attend_keys(
    row_max,
    row_sum,
    attended,
    query,
    place,
    begin,
    stop,
    end,
    position,
    tree_bits,
    tree_start,
    block_ids_ptr,
    key_head_ptr,
    value_head_ptr,
    key_scales_ptr,
    value_scales_ptr,
    scale_log2,
    next_block_id,
    stride_key_cache_block,
    stride_key_cache_slot,
    stride_value_cache_block,
    stride_value_cache_slot,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AHEAD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys at places from `begin` up to `stop` to the running softmax; MASKED where a row may not see all of them.

    With AHEAD, `next_block_id` [BLOCK_N] are the blocks of the first keys, as `load_block_ids` gives them, and what is returned
    in its place those of the keys from `stop` on.

    A row sees the keys up to its own `place` in its request, with a window those behind its `position` less that; of the 64
    from `tree_start` on those whose bit it has. Without trees `tree_bits` is None, and both are the same.
    """
    column = tl.arange(0, BLOCK_D)
    column_mask = column < HEAD_DIM
    for key_start in range(begin, stop, BLOCK_N):
        key_place = key_start + tl.arange(0, BLOCK_N)
        # Slots past the end may hold anything, NaN included, which no weight of zero would undo: they are not loaded.
        key_mask = key_place < end
        if AHEAD:
            block_id = next_block_id.to(tl.int64)
            next_block_id = load_block_ids(block_ids_ptr, key_start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        elif MASKED:
            block_id = tl.load(block_ids_ptr + key_place // BLOCK_SIZE, mask=key_mask, other=0).to(tl.int64)
        else:
            block_id = tl.load(block_ids_ptr + key_place // BLOCK_SIZE).to(tl.int64)
        slot = key_place % BLOCK_SIZE
        key_offset = block_id * stride_key_cache_block + slot * stride_key_cache_slot
        value_offset = block_id * stride_value_cache_block + slot * stride_value_cache_slot
        key_ptrs = key_head_ptr + key_offset[None, :] + column[:, None]
        value_ptrs = value_head_ptr + value_offset[:, None] + column[None, :]
        if FORMAT is not None:
            vector = (block_id * BLOCK_SIZE + slot) * tl.num_programs(1) + tl.program_id(1)
            key, value = load_keys_and_values(
                key_head_ptr,
                value_head_ptr,
                key_scales_ptr,
                value_scales_ptr,
                key_offset,
                value_offset,
                vector,
                key_mask,
                column,
                HEAD_DIM,
                FORMAT,
                query.dtype,
            )
        elif MASKED:
            key = tl.load(key_ptrs, mask=key_mask[None, :] & column_mask[:, None], other=0.0)
            value = tl.load(value_ptrs, mask=key_mask[:, None] & column_mask[None, :], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            key = tl.load(key_ptrs, mask=column_mask[:, None], other=0.0)
            value = tl.load(value_ptrs, mask=column_mask[None, :], other=0.0)
        else:
            key = tl.load(key_ptrs)
            value = tl.load(value_ptrs)

        # "ieee": float32 products are not to be rounded to TF32; other dtypes ignore it.
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2
        if MASKED:
            visible = key_place[None, :] <= place[:, None]
            if WINDOW is not None:
                visible = visible & (key_place[None, :] > position[:, None] - WINDOW)
            if tree_bits is not None:
                node = key_place - tree_start
                shift = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
                is_seen = (tree_bits[:, None] >> shift[None, :]) & 1 != 0
                visible = visible & (is_seen | (node < 0)[None, :])
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row whose window begins behind these keys has seen none, and -inf - -inf is NaN.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores - finite_max[:, None])
        rescale = tl.exp2(row_max - finite_max)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        attended = attended * rescale[:, None]
        attended = tl.dot(weights.to(value.dtype), value, attended, input_precision="ieee")
        row_max = new_max
    return row_max, row_sum, attended, next_block_id
