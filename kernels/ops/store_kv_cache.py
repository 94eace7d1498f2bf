"""Writing keys and values to the paged cache, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_float_dtype, check_tensor


# A step's arrays lie end to end in one buffer: where each begins is not to make another kernel of it.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _store_kv_cache_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_key_cache_block,
    stride_key_cache_slot,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_slot,
    stride_value_cache_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All heads of one token per program. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    # int64, and the cache's strides are multiplied by it: a pool passes 2^31 elements.
    slot = tl.load(slot_mapping_ptr + token)
    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    element = tl.arange(0, BLOCK)
    mask = element < NUM_KV_HEADS * HEAD_DIM
    head = (element // HEAD_DIM).to(tl.int64)
    column = element % HEAD_DIM
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + column, mask=mask)
    value = tl.load(value_ptr + token * stride_value_token + head * stride_value_head + column, mask=mask)
    key_slot_ptr = key_cache_ptr + block_id * stride_key_cache_block + offset * stride_key_cache_slot
    tl.store(key_slot_ptr + head * stride_key_cache_head + column, key, mask=mask)
    value_slot_ptr = value_cache_ptr + block_id * stride_value_cache_block + offset * stride_value_cache_slot
    tl.store(value_slot_ptr + head * stride_value_cache_head + column, value, mask=mask)


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value at its slot.

    `key_cache[slot // block_size, slot % block_size] = key[t]` with `slot = slot_mapping[t]`; values likewise.

    Args:
        key: float32, bfloat16 or float16 [num_tokens, num_kv_heads, head_dim], strides (any, any, 1)
        value: key.dtype, as key
        key_cache: key.dtype [num_blocks, block_size, num_kv_heads, head_dim], strides (any, any, any, 1); mutated
        value_cache: as key_cache; mutated
        slot_mapping: int64 [num_tokens], stride (1,), block_id * block_size + offset; of tokens that share a slot
            (only padding does, in the null block) any one may win
    Raises:
        ValueError: a shape, dtype, device or stride is not as above. Slots are not read, hence not checked.
    """
    check_float_dtype("key", key)
    check_tensor("key", key, (None, None, None), key.dtype, key.device)
    num_tokens, num_kv_heads, head_dim = key.shape
    check_tensor("value", value, (num_tokens, num_kv_heads, head_dim), key.dtype, key.device)
    check_tensor("key_cache", key_cache, (None, None, num_kv_heads, head_dim), key.dtype, key.device)
    check_tensor("value_cache", value_cache, tuple(key_cache.shape), key.dtype, key.device)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, key.device)

    if key.numel() == 0:
        return
    block = triton.next_power_of_2(num_kv_heads * head_dim)
    _store_kv_cache_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        BLOCK_SIZE=key_cache.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 8),  # pyright: ignore[reportCallIssue]  (a launch option)
    )
