"""All before attention: the end of a norm, the QKV product, the rotation and the cache's update, in plain torch."""

from __future__ import annotations

from torch import Tensor

from kernels.reference.code_grid import CodeGrid
from kernels.reference.projection import project
from kernels.reference.qkv_heads import rotate_and_store


def norm_qkv_rotary_store(
    x: Tensor,
    weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    square_sums: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    code_grid: CodeGrid | None = None,
) -> Tensor:
    """Division of a deferred norm, QKV product; queries and keys rotated by position; keys and values stored at slots.

    `qkv[t, n] = sum_k x[t, k] * weight[n, k] / rms[t] + bias[n]` in fp32 with `rms` as in `norm_linear`; then
    `rotary_embedding` of queries and keys in fp32, rounded once; then `store_kv_cache` of keys and values.

    Args:
        x: float [num_tokens, K]
        weight: x.dtype [(num_heads + 2 * num_kv_heads) * head_dim, K]: queries, keys, values
        positions: int64 [num_tokens], below max_position
        cos_sin_cache: float32 [max_position, head_dim], the cosines of a position and then its sines
        key_cache: x.dtype [num_blocks, block_size, num_kv_heads, head_dim], any strides; mutated
        value_cache: as key_cache; mutated
        slot_mapping: int64 [num_tokens], block_id * block_size + offset; of tokens that share a slot (only padding
            does, in the null block) any one may win
        square_sums: float32 [num_tokens, num_parts]: of the x that lacks its norm's division, see `DeferredNorm`; None
            where x needs none
        eps: of the norm, added to the mean square
        bias: x.dtype [(num_heads + 2 * num_kv_heads) * head_dim]
        code_grid: makes the weight one of codes, int32 as `CodeGrid` says
    Returns:
        x.dtype [num_tokens, num_heads, head_dim], contiguous: the rotated queries.
    """
    qkv = project(x, weight, square_sums, eps, bias, code_grid)
    return rotate_and_store(qkv, positions, cos_sin_cache, key_cache, value_cache, slot_mapping)
