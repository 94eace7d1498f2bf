"""Writing keys and values to the paged cache, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.kv_quantization import quantize


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
    what is stored is `quantize(key[t], key_cache.dtype)`, see `kv_quantization`.

    Args:
        key: float [num_tokens, num_kv_heads, head_dim]
        value: key.dtype, as key
        key_cache: key.dtype [num_blocks, block_size, num_kv_heads, head_dim], contiguous; mutated. With scales int8,
            float8_e4m3fn, or uint8 with half as many columns
        value_cache: as key_cache; mutated
        slot_mapping: int64 [num_tokens], block_id * block_size + offset; of tokens that share a slot (only padding
            does, in the null block) any one may win
        key_scales: float16 [num_blocks, block_size, num_kv_heads, 1], for uint8 [..., 2]; mutated
        value_scales: as key_scales; mutated
    """
    if key_scales is None or value_scales is None:
        key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slot_mapping, key)
        value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slot_mapping, value)
        return
    store_quantized(key, key_cache, key_scales, slot_mapping)
    store_quantized(value, value_cache, value_scales, slot_mapping)


def store_quantized(vectors: Tensor, cache: Tensor, scales: Tensor, slot_mapping: Tensor) -> None:
    """The quantized `store_kv_cache` of the keys, or of the values; cache and scales may have any strides."""
    data, new_scales = quantize(vectors, cache.dtype)
    slots = (slot_mapping // cache.shape[1], slot_mapping % cache.shape[1])
    cache.view(torch.uint8).index_put_(slots, data.view(torch.uint8))  # 8-bit floats move as bytes
    scales.index_put_(slots, new_scales)
