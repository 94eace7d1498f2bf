"""Writing keys and values to the paged cache, in plain torch."""

from __future__ import annotations

from torch import Tensor


def store_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value at its slot.

    `key_cache[slot // block_size, slot % block_size] = key[t]` with `slot = slot_mapping[t]`; values likewise.

    Args:
        key: float [num_tokens, num_kv_heads, head_dim]
        value: key.dtype, as key
        key_cache: key.dtype [num_blocks, block_size, num_kv_heads, head_dim], contiguous; mutated
        value_cache: as key_cache; mutated
        slot_mapping: int64 [num_tokens], block_id * block_size + offset; of tokens that share a slot (only padding
            does, in the null block) any one may win
    """
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slot_mapping, value)
