"""Norms of queries and keys, rotary position embedding and the cache's update in one launch, in Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import MAX_HEAD_DIM, as_bytes, check_float_dtype, check_kv_cache, check_tensor
from kernels.ops.kv_quantization import quantize_halves, rotate_halves, store_halves
from kernels.ops.rotary_heads import rotated_heads

# Elements of a program's tile, in each half of its heads: with four warps, a 16-byte load per thread and half.
TILE = 1024


# A step's arrays lie end to end in one buffer: where each begins is not to make another kernel of it.
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"])
def _rotary_and_store_kernel(
    query_ptr,
    qkv_ptr,
    positions_ptr,
    cos_sin_cache_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    q_norm_weight_ptr,
    k_norm_weight_ptr,
    eps,
    stride_qkv_token,
    stride_cos_sin_cache_position,
    stride_key_cache_block,
    stride_key_cache_slot,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_slot,
    stride_value_cache_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QK_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Some heads of one token per program, whether of q, k or v; the two halves of a head in two tiles.

    Grid: (num_tokens, cdiv(NUM_HEADS + 2 * NUM_KV_HEADS, BLOCK_HEADS)).
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    column_mask = column < HALF
    left, right, slot = rotated_heads(
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
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_HALF,
        QK_NORM,
    )

    query_ptr += (token * NUM_HEADS * HEAD_DIM + head * HEAD_DIM)[:, None] + column[None, :]
    query_mask = (head < NUM_HEADS)[:, None] & column_mask[None, :]
    tl.store(query_ptr, left, mask=query_mask)
    tl.store(query_ptr + HALF, right, mask=query_mask)

    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    kv_head = (head - NUM_HEADS).to(tl.int64)
    key_cache_ptr += block_id * stride_key_cache_block + offset * stride_key_cache_slot
    key_cache_ptr += (kv_head * stride_key_cache_head)[:, None] + column[None, :]
    key_mask = ((kv_head >= 0) & (kv_head < NUM_KV_HEADS))[:, None] & column_mask[None, :]
    tl.store(key_cache_ptr, left, mask=key_mask)
    tl.store(key_cache_ptr + HALF, right, mask=key_mask)

    kv_head -= NUM_KV_HEADS
    value_cache_ptr += block_id * stride_value_cache_block + offset * stride_value_cache_slot
    value_cache_ptr += (kv_head * stride_value_cache_head)[:, None] + column[None, :]
    value_mask = ((kv_head >= 0) & (kv_head < NUM_KV_HEADS))[:, None] & column_mask[None, :]
    tl.store(value_cache_ptr, left, mask=value_mask)
    tl.store(value_cache_ptr + HALF, right, mask=value_mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"])
def _rotary_and_quantize_kernel(
    query_ptr,
    qkv_ptr,
    positions_ptr,
    cos_sin_cache_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slot_mapping_ptr,
    q_norm_weight_ptr,
    k_norm_weight_ptr,
    eps,
    stride_qkv_token,
    stride_cos_sin_cache_position,
    stride_key_cache_block,
    stride_key_cache_slot,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_slot,
    stride_value_cache_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QK_NORM: tl.constexpr,
    FORMAT: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """As `_rotary_and_store_kernel`, and the same grid; for int4 BLOCK_HALF is half a head, 2^LEVELS."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    left, right, slot = rotated_heads(
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
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_HALF,
        QK_NORM,
    )
    if FORMAT == "int4":
        mixed_left, mixed_right = rotate_halves(
            left.to(tl.float32), right.to(tl.float32), BLOCK_HEADS, BLOCK_HALF, LEVELS
        )
        is_mixed = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
        left = tl.where(is_mixed, mixed_left.to(left.dtype), left)
        right = tl.where(is_mixed, mixed_right.to(right.dtype), right)

    query_ptr += (token * NUM_HEADS * HEAD_DIM + head * HEAD_DIM)[:, None] + column[None, :]
    query_mask = (head < NUM_HEADS)[:, None] & (column < HALF)[None, :]
    tl.store(query_ptr, left, mask=query_mask)
    tl.store(query_ptr + HALF, right, mask=query_mask)

    first, second, scale, minimum = quantize_halves(left.to(tl.float32), right.to(tl.float32), FORMAT)
    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    kv_head = (head - NUM_HEADS).to(tl.int64)
    key_ptrs = key_cache_ptr + block_id * stride_key_cache_block + offset * stride_key_cache_slot
    store_halves(
        key_ptrs + kv_head * stride_key_cache_head,
        key_scales_ptr + (slot * NUM_KV_HEADS + kv_head) * NUM_SCALES,
        first,
        second,
        scale,
        minimum,
        (kv_head >= 0) & (kv_head < NUM_KV_HEADS),
        column,
        HALF,
        FORMAT,
    )
    kv_head -= NUM_KV_HEADS
    value_ptrs = value_cache_ptr + block_id * stride_value_cache_block + offset * stride_value_cache_slot
    store_halves(
        value_ptrs + kv_head * stride_value_cache_head,
        value_scales_ptr + (slot * NUM_KV_HEADS + kv_head) * NUM_SCALES,
        first,
        second,
        scale,
        minimum,
        (kv_head >= 0) & (kv_head < NUM_KV_HEADS),
        column,
        HALF,
        FORMAT,
    )


def rotary_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate each token's queries and keys, store its keys and values at its slot, return the queries.

    With norm weights each head x of q is first `cast(x[i] / sqrt(mean_j(x[j]^2) + eps)) * q_norm_weight[i]`, and of k
    likewise, in fp32 up to the cast to `qkv.dtype`, to which the product is rounded as well. Then
    `y[i] = x[i] cos[i] - x[D/2 + i] sin[i]` and `y[D/2 + i] = x[D/2 + i] cos[i] + x[i] sin[i]` for each head of q and k
    (Su et al., "RoFormer", 2021, in its half-split form), in fp32 and rounded once to `qkv.dtype`. Then
    `key_cache[slot // block_size, slot % block_size] = k[t]` with `slot = slot_mapping[t]`; values likewise, as they are.
    With scales, what is stored is quantized, see `kernels.reference.kv_quantization`, and where it is uint8 queries and keys
    are multiplied by the Hadamard matrix first.

    Args:
        qkv: float32, bfloat16 or float16 [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], strides (any, 1), the
            heads of q, then of k, then of v
        positions: int64 [num_tokens], stride (1,), below max_position
        cos_sin_cache: float32 [max_position, head_dim], strides (any, 1), the cosines of a position and then its sines
        key_cache: qkv.dtype [num_blocks, block_size, num_kv_heads, head_dim], strides (any, any, any, 1); mutated. With
            scales int8, float8_e4m3fn, or uint8 with half as many columns
        value_cache: as key_cache; mutated
        slot_mapping: int64 [num_tokens], stride (1,), block_id * block_size + offset; of tokens that share a slot
            (only padding does, in the null block) any one may win, element by element
        num_heads: of q
        key_scales: float16 [num_blocks, block_size, num_kv_heads, 1], for uint8 [..., 2], contiguous; mutated
        value_scales: as key_scales; mutated
        q_norm_weight: qkv.dtype [head_dim], stride (1,); None: neither queries nor keys are normalised
        k_norm_weight: as q_norm_weight
        eps: added to the mean square of a head
    Returns:
        The rotated query, qkv.dtype [num_tokens, num_heads, head_dim], contiguous.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, num_heads is below 1, one norm weight comes without
            the other, or head_dim is odd or above 256, or no power of two where the cache is uint8. Positions and slots are
            not read, hence not checked.
    """
    check_float_dtype("qkv", qkv)
    kv_format = check_kv_cache(key_cache, value_cache, key_scales, value_scales, None, None, qkv)
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    head_dim *= 2 if kv_format == "int4" else 1
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}; allowed are 1 and more")
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"key_cache has a head_dim of {head_dim}; allowed are even ones from 2 to {MAX_HEAD_DIM}")
    if kv_format == "int4" and head_dim & (head_dim - 1):
        raise ValueError(f"key_cache has a head_dim of {head_dim}; of int4 it has to be a power of two")
    num_all_heads = num_heads + 2 * num_kv_heads
    check_tensor("qkv", qkv, (None, num_all_heads * head_dim), qkv.dtype, qkv.device)
    num_tokens = qkv.shape[0]
    check_tensor("positions", positions, (num_tokens,), torch.int64, qkv.device)
    check_tensor("cos_sin_cache", cos_sin_cache, (None, head_dim), torch.float32, qkv.device)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, qkv.device)
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight go together; one of them is None")
    if q_norm_weight is not None and k_norm_weight is not None:
        check_tensor("q_norm_weight", q_norm_weight, (head_dim,), qkv.dtype, qkv.device)
        check_tensor("k_norm_weight", k_norm_weight, (head_dim,), qkv.dtype, qkv.device)

    query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return query
    block_half = triton.next_power_of_2(head_dim // 2)
    block_heads = min(triton.next_power_of_2(num_all_heads), max(TILE // block_half, 1))
    grid = (num_tokens, triton.cdiv(num_all_heads, block_heads))
    kernel: Any = _rotary_and_store_kernel
    caches, options = [key_cache, value_cache], {}
    if kv_format is not None and key_scales is not None:
        kernel = _rotary_and_quantize_kernel
        caches = [as_bytes(key_cache), as_bytes(value_cache), key_scales, value_scales]
        options = {"FORMAT": kv_format, "NUM_SCALES": key_scales.shape[3], "LEVELS": block_half.bit_length() - 1}
    kernel[grid](
        query,
        qkv,
        positions,
        cos_sin_cache,
        *caches,
        slot_mapping,
        q_norm_weight,
        k_norm_weight,
        eps,
        qkv.stride(0),
        cos_sin_cache.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        QK_NORM=q_norm_weight is not None,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=4,
        # A product and a sum rounded as one would differ from the reference's, where the roundings are two.
        enable_fp_fusion=False,
        **options,
    )
    return query
