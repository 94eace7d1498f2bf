"""All before attention over a weight in NormalFloat4, for few tokens, in one Triton kernel: QKV, rotation, KV store."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.nf4_launch import MAX_FEW_TOKENS, check_nf4_product, default_nf4_tiles, few_tokens_options
from kernels.ops.nf4_levels import level_table, table_words
from kernels.ops.nf4_projection import project_nf4
from kernels.ops.projection import Tiles, _split_halves
from kernels.ops.qkv_outputs import check_heads, load_angles, rotate_and_store
from kernels.reference.int_words import CHUNK


# A step's arrays lie end to end in one buffer: where each begins is not to make another kernel of it.
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"],
)
def _nf4_qkv_rotary_store_kernel(
    query_ptr,
    x_ptr,
    words_ptr,
    levels_ptr,
    tables_ptr,
    codes_ptr,
    steps_ptr,
    means_ptr,
    bias_ptr,
    positions_ptr,
    cos_sin_cache_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    num_tokens,
    num_columns,
    num_chunks,
    stride_query_token,
    stride_x_token,
    stride_words_row,
    stride_codes_row,
    stride_codes_block,
    stride_cos_sin_position,
    stride_key_cache_block,
    stride_key_cache_slot,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_slot,
    stride_value_cache_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LEVEL_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N / 2 rotation pairs (i, HEAD_DIM / 2 + i) of one head per program.

    Grid: ((NUM_HEADS + 2 * NUM_KV_HEADS) * cdiv(HEAD_DIM / 2, BLOCK_N / 2), cdiv(num_tokens, BLOCK_M)).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = BLOCK_N // 2
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    PARTS: tl.constexpr = (HALF_DIM + HALF - 1) // HALF
    NUM_ROWS: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    head = tl.program_id(0) // PARTS
    first_pair = (tl.program_id(0) % PARTS) * HALF
    first_row = head * HEAD_DIM + first_pair
    first_token = tl.program_id(1) * BLOCK_M
    token = first_token + tl.arange(0, BLOCK_M)
    token_mask = token < num_tokens
    pair = first_pair + tl.arange(0, HALF)
    pair_mask = pair < HALF_DIM
    mask = token_mask[:, None] & pair_mask[None, :]

    # What the sum needs at its end is asked for at its begin.
    left_row = head * HEAD_DIM + pair
    if BIAS:
        left_bias = tl.load(bias_ptr + left_row, mask=pair_mask, other=0.0).to(tl.float32)
        right_bias = tl.load(bias_ptr + left_row + HALF_DIM, mask=pair_mask, other=0.0).to(tl.float32)
    slot = tl.load(slot_mapping_ptr + token, mask=token_mask, other=0)
    cos, sin = load_angles(
        cos_sin_cache_ptr, positions_ptr, token, pair, mask, token_mask, stride_cos_sin_position, HALF_DIM
    )
    sums = project_nf4(
        x_ptr,
        words_ptr,
        levels_ptr,
        tables_ptr,
        codes_ptr,
        steps_ptr,
        means_ptr,
        first_row,
        first_row + HALF_DIM,
        NUM_ROWS,
        first_token,
        num_tokens,
        num_columns,
        num_chunks,
        stride_x_token,
        stride_words_row,
        stride_codes_row,
        stride_codes_block,
        BLOCK,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        SHARES,
        AHEAD,
        ONCE,
        ASM,
        PDL,
    )
    left, right = _split_halves(sums * (1.0 / LEVEL_SCALE), BLOCK_M, HALF)
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
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """QKV product; queries and keys rotated by position; keys and values stored at slots.

    `qkv[t, n] = sum_k x[t, k] * W[n, k] + bias[n]` in fp32 with W of `nf4_linear`, levels rounded to x.dtype; then
    `rotary_embedding` of queries and keys in fp32, rounded once; then `store_kv_cache` of keys and values.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1), num_tokens at most 16
        words, codes, steps, means: as `nf4_linear` takes them, of (num_heads + 2 * num_kv_heads) * head_dim rows: queries, keys,
            values
        positions: int64 [num_tokens], stride (1,), below max_position
        cos_sin_cache: float32 [max_position, head_dim], strides (any, 1): cosines of a position, then sines
        key_cache: x.dtype [num_blocks, block_size, num_kv_heads, head_dim], strides (any, any, any, 1); mutated
        value_cache: as key_cache; mutated
        slot_mapping: int64 [num_tokens], stride (1,), block_id * block_size + offset; tokens may share slots of the null
            block only
        bias: x.dtype [rows of codes], stride (1,)
        tiles: how to cut the product, by default chosen from the sizes: a warp takes a share of the inputs, block_m is 1, 8 or
            16 and block_n a multiple of 16
    Returns:
        x.dtype [num_tokens, num_heads, head_dim], contiguous: the rotated queries.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, head_dim is odd, or the weight's rows are not a
            number of heads that leaves any for the queries. Values on the device are not read.
    """
    check_nf4_product(x, words, codes, steps, means, bias)
    num_tokens, num_columns = x.shape
    num_rows, num_blocks = codes.shape
    if num_tokens > MAX_FEW_TOKENS:
        raise ValueError(f"x has {num_tokens} tokens; at most {MAX_FEW_TOKENS} are allowed")
    num_heads = check_heads(
        num_rows, num_tokens, x.dtype, x.device, positions, cos_sin_cache, key_cache, value_cache, slot_mapping
    )
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=x.dtype, device=codes.device)
    if num_tokens == 0:
        return query
    tiles = tiles or default_nf4_tiles(num_tokens, num_rows, num_columns)
    parts = triton.cdiv(head_dim // 2, tiles.block_n // 2)
    grid = ((num_heads + 2 * num_kv_heads) * parts, triton.cdiv(num_tokens, tiles.block_m))
    _nf4_qkv_rotary_store_kernel[grid](
        query,
        x,
        words,
        level_table(x.dtype, x.device),
        table_words(x.dtype, x.device),
        codes,
        steps,
        means,
        bias,
        positions,
        cos_sin_cache,
        key_cache,
        value_cache,
        slot_mapping,
        num_tokens,
        num_columns,
        triton.cdiv(num_columns, CHUNK),
        query.stride(0),
        x.stride(0),
        words.stride(0),
        codes.stride(0),
        codes.stride(1),
        cos_sin_cache.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BIAS=bias is not None,
        **few_tokens_options(num_columns, num_blocks, x.dtype, x.device, tiles),
    )
    return query
