"""All before attention, for few tokens, in one Triton kernel: end of the norm, QKV product, rotation, KV store."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.code_launch import check_fused_product, fused_launch
from kernels.ops.code_projection import project_codes
from kernels.ops.fragment_projection import load_fragments
from kernels.ops.projection import Tiles, _split_halves, begin_early, project_halves
from kernels.ops.qkv_outputs import check_heads, load_angles, rotate_and_store
from kernels.reference.code_grid import CodeGrid


# A step's arrays lie end to end in one buffer: where each begins is not to make another kernel of it.
@triton.jit(
    do_not_specialize=["num_tokens", "num_parts", "stride_square_sums_token", "magic"],
    do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"],
)
def _norm_qkv_rotary_store_kernel(
    query_ptr,
    x_ptr,
    weight_ptr,
    square_sums_ptr,
    bias_ptr,
    positions_ptr,
    cos_sin_cache_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    num_tokens,
    num_columns,
    num_parts,
    eps,
    stride_query_token,
    stride_x_token,
    stride_weight_row,
    stride_square_sums_token,
    stride_cos_sin_position,
    stride_key_cache_block,
    stride_key_cache_slot,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_slot,
    stride_value_cache_head,
    scales_ptr,
    origins_ptr,
    magic,
    num_chunks,
    stride_scales_row,
    stride_scales_group,
    stride_origins_row,
    stride_origins_group,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    SMALL: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    SHARES: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    FRAGMENTS: tl.constexpr = 0,  # a weight of codes has none
    FRAGMENTS_ONCE: tl.constexpr = False,
):
    """BLOCK_N / 2 rotation pairs (i, HEAD_DIM / 2 + i) of one head per program.

    With TMA, x and the weight are descriptors; with BITS, the weight is codes, and the product `project_codes`.

    Grid: ((NUM_HEADS + 2 * NUM_KV_HEADS) * cdiv(HEAD_DIM / 2, BLOCK_N / 2), cdiv(num_tokens, BLOCK_M)).
    """
    HALF: tl.constexpr = BLOCK_N // 2
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    PARTS: tl.constexpr = (HALF_DIM + HALF - 1) // HALF
    head = tl.program_id(0) // PARTS
    first_pair = (tl.program_id(0) % PARTS) * HALF
    lane = tl.arange(0, BLOCK_N)
    row = head * HEAD_DIM + tl.minimum(first_pair + lane % HALF, HALF_DIM - 1) + (lane // HALF) * HALF_DIM
    first_token = tl.program_id(1) * BLOCK_M
    token = first_token + tl.arange(0, BLOCK_M)
    token_mask = token < num_tokens
    pair = first_pair + tl.arange(0, HALF)
    pair_mask = pair < HALF_DIM
    mask = token_mask[:, None] & pair_mask[None, :]

    # What the sum needs at its end is asked for at its begin.
    begin_early(weight_ptr, row, num_columns, stride_weight_row, SMALL, PDL)
    first_row = head * HEAD_DIM + first_pair
    fragments = load_fragments(
        weight_ptr,
        first_row,
        first_row + HALF_DIM,
        (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM,
        num_columns,
        stride_weight_row,
        EVEN_K,
        BLOCK_N,
        BLOCK_K,
        FRAGMENTS,
        FRAGMENTS_ONCE,
    )
    if BIAS:
        left_bias = tl.load(bias_ptr + head * HEAD_DIM + pair, mask=pair_mask, other=0.0).to(tl.float32)
        right_bias = tl.load(bias_ptr + head * HEAD_DIM + HALF_DIM + pair, mask=pair_mask, other=0.0).to(tl.float32)
    slot = tl.load(slot_mapping_ptr + token, mask=token_mask, other=0)
    cos, sin = load_angles(
        cos_sin_cache_ptr, positions_ptr, token, pair, mask, token_mask, stride_cos_sin_position, HALF_DIM
    )
    if BITS > 0:
        total = project_codes(
            x_ptr,
            weight_ptr,
            scales_ptr,
            origins_ptr,
            magic,
            first_row,
            first_row + HALF_DIM,
            (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM,
            first_token,
            num_tokens,
            num_columns,
            num_chunks,
            stride_x_token,
            stride_weight_row,
            stride_scales_row,
            stride_scales_group,
            stride_origins_row,
            stride_origins_group,
            BITS,
            ORIGIN,
            GROUP,
            EVEN,
            BLOCK_M,
            BLOCK_N,
            SHARES,
            AHEAD,
            ONCE,
            PDL,
        )
        left, right = _split_halves(total, BLOCK_M, HALF)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        left, right = project_halves(
            fragments,
            x_ptr,
            weight_ptr,
            square_sums_ptr,
            row,
            first_row,
            first_row + HALF_DIM,
            (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM,
            first_token,
            num_tokens,
            num_columns,
            num_parts,
            eps,
            stride_x_token,
            stride_weight_row,
            stride_square_sums_token,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            BLOCK_PARTS,
            TMA,
            FRAGMENTS,
            FRAGMENTS_ONCE,
        )
    if BIAS:
        left += left_bias[None, :]
        right += right_bias[None, :]
    rotate_and_store(
        query_ptr,
        key_cache_ptr,
        value_cache_ptr,
        left,
        right,
        cos,
        sin,
        slot,
        token,
        pair,
        mask,
        head,
        stride_query_token,
        stride_key_cache_block,
        stride_key_cache_slot,
        stride_key_cache_head,
        stride_value_cache_block,
        stride_value_cache_slot,
        stride_value_cache_head,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
    )


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
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """Division of a deferred norm, QKV product; queries and keys rotated by position; keys and values stored at slots.

    `qkv[t, n] = sum_k x[t, k] * weight[n, k] / rms[t] + bias[n]` in fp32 with `rms` as in `norm_linear`; then
    `rotary_embedding` of queries and keys in fp32, rounded once; then `store_kv_cache` of keys and values.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1)
        weight: x.dtype [(num_heads + 2 * num_kv_heads) * head_dim, K], strides (any, 1): queries, keys, values
        positions: int64 [num_tokens], stride (1,), below max_position
        cos_sin_cache: float32 [max_position, head_dim], strides (any, 1): cosines of a position, then sines
        key_cache: x.dtype [num_blocks, block_size, num_kv_heads, head_dim], strides (any, any, any, 1); mutated
        value_cache: as key_cache; mutated
        slot_mapping: int64 [num_tokens], stride (1,), block_id * block_size + offset; tokens may share slots of the null
            block only
        square_sums: float32 [num_tokens, num_parts], strides (any, 1): of the x that lacks its norm's division, see
            `DeferredNorm`; None where x needs none
        eps: of the norm, added to the mean square
        bias: x.dtype [(num_heads + 2 * num_kv_heads) * head_dim], stride (1,)
        code_grid: makes the weight one of codes, int32 as `CodeGrid` says, on its device; for at most 16 tokens, and without
            square_sums
        tiles: how to cut the product; by default chosen from the sizes. With codes as for few tokens of `int_linear`
    Returns:
        x.dtype [num_tokens, num_heads, head_dim], contiguous: the rotated queries.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, head_dim is odd, or the weight's rows are not a
            number of heads that leaves any for the queries. Values on the device are not read.
    """
    code = check_fused_product(x, weight, square_sums, bias, code_grid)
    num_tokens, num_columns = x.shape
    heads = (positions, cos_sin_cache, key_cache, value_cache, slot_mapping)
    num_heads = check_heads(weight.shape[0], num_tokens, x.dtype, x.device, *heads)
    _, block_size, num_kv_heads, head_dim = key_cache.shape

    query = torch.empty((num_tokens, num_heads, head_dim), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return query
    launch, tiles, codes = fused_launch(x, weight, square_sums, code, tiles)
    parts = triton.cdiv(head_dim // 2, tiles.block_n // 2)
    grid = ((num_heads + 2 * num_kv_heads) * parts, triton.cdiv(num_tokens, tiles.block_m))
    _norm_qkv_rotary_store_kernel[grid](
        query,
        launch.x,
        launch.weight,
        square_sums,
        bias,
        positions,
        cos_sin_cache,
        key_cache,
        value_cache,
        slot_mapping,
        num_tokens,
        num_columns,
        launch.num_parts,
        eps,
        query.stride(0),
        x.stride(0),
        weight.stride(0),
        launch.stride_square_sums_token,
        cos_sin_cache.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        *codes,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BIAS=bias is not None,
        **launch.options,
    )
    return query
