"""Rotary position embedding and the cache's update in one, in plain torch."""

from __future__ import annotations

from torch import Tensor

from kernels.reference.rotary_embedding import rotary_embedding


def rotary_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
) -> Tensor:
    """Rotate each token's queries and keys, store its keys and values at its slot, return the queries.

    `query, key = rotary_embedding(q, k, positions, cos_sin_cache)`, then `key_cache[slot // block_size, slot % block_size]
    = key[t]` with `slot = slot_mapping[t]`; values likewise, as they are.

    Args:
        qkv: float [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], the heads of q, then of k, then of v
        positions: int64 [num_tokens], below max_position
        cos_sin_cache: float32 [max_position, head_dim], the cosines of a position and then its sines
        key_cache: qkv.dtype [num_blocks, block_size, num_kv_heads, head_dim], any strides; mutated
        value_cache: as key_cache; mutated
        slot_mapping: int64 [num_tokens], block_id * block_size + offset; of tokens that share a slot (only padding
            does, in the null block) any one may win
        num_heads: of q
    Returns:
        The rotated query, qkv.dtype [num_tokens, num_heads, head_dim], contiguous.
    """
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    query, key = rotary_embedding(query, key, positions, cos_sin_cache)
    # Not by one index over a flat view, which a cache of other strides does not have.
    slots = (slot_mapping // block_size, slot_mapping % block_size)
    key_cache.index_put_(slots, key)
    value_cache.index_put_(slots, value)
    return query.contiguous()
