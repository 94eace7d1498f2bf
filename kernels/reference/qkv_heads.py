"""What the references of QKV products share: the rotation, and the cache's update."""

from __future__ import annotations

from torch import Tensor

from kernels.reference.rotary_embedding import rotary_embedding


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Queries and keys of a product rotated by position, and keys and values stored at slots, each rounded once.

    Args:
        qkv: float32 [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values
        positions, cos_sin_cache, slot_mapping: as `norm_qkv_rotary_store` takes them
        key_cache, value_cache: float [num_blocks, block_size, num_kv_heads, head_dim], any strides; mutated
    Returns:
        the caches' dtype [num_tokens, num_heads, head_dim], contiguous: the rotated queries.
    """
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    query, key = rotary_embedding(query, key, positions, cos_sin_cache)
    # Not by one index over a flat view, which a cache of other strides does not have.
    slots = (slot_mapping // block_size, slot_mapping % block_size)
    key_cache.index_put_(slots, key.to(key_cache.dtype))
    value_cache.index_put_(slots, value.to(key_cache.dtype))
    return query.to(key_cache.dtype).contiguous()
