"""Rotary position embedding, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each head's pairs (i, D/2 + i) by its token's angles.

    `y[i] = x[i] cos[i] - x[D/2 + i] sin[i]` and `y[D/2 + i] = x[D/2 + i] cos[i] + x[i] sin[i]`, the half-split form of
    Su et al., "RoFormer" (2021), that Hugging Face's Llama uses. The arithmetic is in fp32.

    Args:
        query: float [num_tokens, num_heads, head_dim]
        key: query.dtype [num_tokens, num_kv_heads, head_dim]
        positions: int64 [num_tokens], below max_position
        cos_sin_cache: float32 [max_position, head_dim], the cosines of a position and then its sines
    Returns:
        The rotated query and key, of their shapes and dtype; nothing is mutated.
    """
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    # Both at once: at decode sizes the cost is the number of torch calls, not the arithmetic.
    left, right = torch.cat((query, key), dim=1).float().chunk(2, dim=-1)
    rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(query.dtype)
    rotated_query, rotated_key = rotated.split((num_heads, num_kv_heads), dim=1)
    return rotated_query, rotated_key
