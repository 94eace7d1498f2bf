"""All before attention over a weight in NormalFloat4: QKV product, rotation and the cache's update, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.nf4_linear import dequantize_nf4
from kernels.reference.nf4_words import from_nf4_chunks
from kernels.reference.qkv_heads import rotate_and_store


def nf4_qkv_rotary_store(
    x: Tensor,
    words: Tensor,
    codes: Tensor,
    steps: Tensor,
    means: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """QKV product in float32; queries and keys rotated by position; keys and values stored at slots.

    The weight is rounded to x's dtype, as tensor cores take it.

    Args: as `nf4_linear` for the product, and as `norm_qkv_rotary_store`; rows are queries, keys, values.
    Returns:
        x.dtype [num_tokens, num_heads, head_dim], contiguous: the rotated queries.
    """
    weight = dequantize_nf4(from_nf4_chunks(words, x.shape[1]), codes, steps, means, x.shape[1])
    qkv = torch.mm(x.float(), weight.to(x.dtype).float().t())
    qkv = qkv if bias is None else qkv + bias.float()
    return rotate_and_store(qkv, positions, cos_sin_cache, key_cache, value_cache, slot_mapping)
