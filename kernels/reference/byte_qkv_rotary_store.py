"""All before attention over weights and tokens in 8 bits: QKV product, rotation and the cache's update, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.int8_linear import multiply_int8
from kernels.reference.qkv_heads import rotate_and_store
from kernels.reference.token_codes import TokenCodes


def byte_qkv_rotary_store(
    x: TokenCodes,
    codes: Tensor,
    scales: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """QKV product in float32; queries and keys rotated by position; keys and values stored at slots.

    Args: as `byte_gated_linear` for the product, and as `norm_qkv_rotary_store`; rows are queries, keys, values.
    Returns:
        x.dtype [num_tokens, num_heads, head_dim], contiguous: the rotated queries.
    """
    is_int8 = codes.dtype == torch.int8
    sums = multiply_int8(x.codes, codes) if is_int8 else x.codes.float() @ codes.float().t()
    qkv = sums * x.scales * scales.t()
    qkv = qkv if bias is None else qkv + bias.float()
    return rotate_and_store(qkv, positions, cos_sin_cache, key_cache, value_cache, slot_mapping)
