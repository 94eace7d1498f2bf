"""Norms of queries and keys, rotary position embedding and the cache's update in one, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.kv_quantization import rotate
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rotary_embedding import rotary_embedding
from kernels.reference.store_kv_cache import store_quantized


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

    With norm weights each head of q and of k is first normalised by itself, `q = rms_norm(q, q_norm_weight, eps)`. Then
    `query, key = rotary_embedding(q, k, positions, cos_sin_cache)`, and `key_cache[slot // block_size, slot % block_size]
    = key[t]` with `slot = slot_mapping[t]`; values likewise, as they are. With scales, what is stored is quantized, see
    `kv_quantization`, and where it is uint8 queries and keys are multiplied by the Hadamard matrix first.

    Args:
        qkv: float [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], the heads of q, then of k, then of v
        positions: int64 [num_tokens], below max_position
        cos_sin_cache: float32 [max_position, head_dim], the cosines of a position and then its sines
        key_cache: qkv.dtype [num_blocks, block_size, num_kv_heads, head_dim], any strides; mutated. With scales int8,
            float8_e4m3fn, or uint8 with half as many columns
        value_cache: as key_cache; mutated
        slot_mapping: int64 [num_tokens], block_id * block_size + offset; of tokens that share a slot (only padding
            does, in the null block) any one may win
        num_heads: of q
        key_scales: float16 [num_blocks, block_size, num_kv_heads, 1], for uint8 [..., 2]; mutated
        value_scales: as key_scales; mutated
        q_norm_weight: qkv.dtype [head_dim]; None: neither queries nor keys are normalised
        k_norm_weight: as q_norm_weight
        eps: added to the mean square of a head
    Returns:
        The rotated query, qkv.dtype [num_tokens, num_heads, head_dim], contiguous.
    """
    _, block_size, num_kv_heads, width = key_cache.shape
    head_dim = 2 * width if key_cache.dtype == torch.uint8 else width
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm_weight is not None and k_norm_weight is not None:
        query = rms_norm(query.reshape(-1, head_dim), q_norm_weight, eps).view_as(query)
        key = rms_norm(key.reshape(-1, head_dim), k_norm_weight, eps).view_as(key)
    query, key = rotary_embedding(query, key, positions, cos_sin_cache)
    if key_scales is None or value_scales is None:
        # Not by one index over a flat view, which a cache of other strides does not have.
        slots = (slot_mapping // block_size, slot_mapping % block_size)
        key_cache.index_put_(slots, key)
        value_cache.index_put_(slots, value)
        return query.contiguous()
    if key_cache.dtype == torch.uint8:
        query, key = rotate(query), rotate(key)
    store_quantized(key, key_cache, key_scales, slot_mapping)
    store_quantized(value, value_cache, value_scales, slot_mapping)
    return query.contiguous()
