"""Writing keys and values to the paged cache, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import as_bytes, check_float_dtype, check_kv_cache, check_tensor
from kernels.ops.kv_quantization import quantize_halves, store_halves


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


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _quantize_vectors_kernel(
    vectors_ptr,
    cache_ptr,
    scales_ptr,
    slot_mapping_ptr,
    stride_vectors_token,
    stride_vectors_head,
    stride_cache_block,
    stride_cache_slot,
    stride_cache_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """All keys, or all values, of one token per program. Grid: (num_tokens,)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    # int64, and the cache's strides are multiplied by it: a pool passes 2^31 elements.
    slot = tl.load(slot_mapping_ptr + token)
    head = tl.arange(0, BLOCK_HEADS).to(tl.int64)
    column = tl.arange(0, BLOCK_HALF)
    mask = (head < NUM_KV_HEADS)[:, None] & (column < HALF)[None, :]
    left_ptr = vectors_ptr + token * stride_vectors_token + (head * stride_vectors_head)[:, None] + column[None, :]
    left = tl.load(left_ptr, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(left_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    first, second, scale, minimum = quantize_halves(left, right, FORMAT)
    slot_ptr = cache_ptr + (slot // BLOCK_SIZE) * stride_cache_block + (slot % BLOCK_SIZE) * stride_cache_slot
    store_halves(
        slot_ptr + head * stride_cache_head,
        scales_ptr + (slot * NUM_KV_HEADS + head) * NUM_SCALES,
        first,
        second,
        scale,
        minimum,
        head < NUM_KV_HEADS,
        column,
        HALF,
        FORMAT,
    )


def store_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Store each token's key and value at its slot.

    `key_cache[slot // block_size, slot % block_size] = key[t]` with `slot = slot_mapping[t]`; values likewise. With scales,
    what is stored is `quantize(key[t], key_cache.dtype)`, see `kernels.reference.kv_quantization`.

    Args:
        key: float32, bfloat16 or float16 [num_tokens, num_kv_heads, head_dim], strides (any, any, 1)
        value: key.dtype, as key
        key_cache: key.dtype [num_blocks, block_size, num_kv_heads, head_dim], strides (any, any, any, 1); mutated. With
            scales int8, float8_e4m3fn, or uint8 with half as many columns
        value_cache: as key_cache; mutated
        slot_mapping: int64 [num_tokens], stride (1,), block_id * block_size + offset; of tokens that share a slot
            (only padding does, in the null block) any one may win
        key_scales: float16 [num_blocks, block_size, num_kv_heads, 1], for uint8 [..., 2], contiguous; mutated
        value_scales: as key_scales; mutated
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or there are scales and head_dim is odd. Slots are not
            read, hence not checked.
    """
    check_float_dtype("key", key)
    check_tensor("key", key, (None, None, None), key.dtype, key.device)
    num_tokens, num_kv_heads, head_dim = key.shape
    check_tensor("value", value, (num_tokens, num_kv_heads, head_dim), key.dtype, key.device)
    kv_format = check_kv_cache(key_cache, value_cache, key_scales, value_scales, num_kv_heads, head_dim, key)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, key.device)

    if key.numel() == 0:
        return
    if kv_format is not None and key_scales is not None and value_scales is not None:
        _quantize(key, key_cache, key_scales, slot_mapping, kv_format)
        _quantize(value, value_cache, value_scales, slot_mapping, kv_format)
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


def _quantize(vectors: Tensor, cache: Tensor, scales: Tensor, slot_mapping: Tensor, kv_format: str) -> None:
    num_tokens, num_kv_heads, head_dim = vectors.shape
    if head_dim % 2:
        raise ValueError(f"a quantized cache takes an even head_dim; key has {head_dim}")
    _quantize_vectors_kernel[(num_tokens,)](
        vectors,
        as_bytes(cache),
        scales,
        slot_mapping,
        vectors.stride(0),
        vectors.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        BLOCK_SIZE=cache.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        FORMAT=kv_format,
        NUM_SCALES=scales.shape[3],
        BLOCK_HEADS=triton.next_power_of_2(num_kv_heads),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        # A product and a sum rounded as one would differ from the reference's, where the roundings are two.
        enable_fp_fusion=False,  # pyright: ignore[reportCallIssue]  (a launch option, not the kernel's)
    )
