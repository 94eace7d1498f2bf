"""The product of many tokens with a weight of integer codes, in tiles. Not an op: the kernel that `int_linear` launches."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.int_codes import chunk_part
from kernels.ops.linear_outputs import store_outputs
from kernels.ops.split_sums import sum_splits


@triton.jit
def _wide_codes(words, zero, magic, PART: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr):
    """Words [rows, 16] -> codes without their zero, DTYPE [rows, 128 / PARTS]."""
    codes = chunk_part(words, magic, PART, PARTS, DTYPE)
    if PARTS == 1:
        codes = tl.permute(codes, [0, 2, 3, 1, 4])
    elif PARTS == 2:
        codes = tl.permute(codes, [0, 2, 1, 3])
    return tl.reshape(codes, [ROWS, 128 // PARTS]) - zero


@triton.jit(do_not_specialize=["num_tokens", "magic"])
def many_tokens_kernel(
    output_ptr,
    partial_ptr,
    counters_ptr,
    x_ptr,
    words_ptr,
    scales_ptr,
    origins_ptr,
    bias_ptr,
    residual_ptr,
    magic,
    num_tokens,
    num_rows,
    num_columns,
    num_chunks,
    stride_output_token,
    stride_x_token,
    stride_words_row,
    stride_scales_row,
    stride_scales_group,
    stride_origins_row,
    stride_origins_group,
    stride_residual_token,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens, summed over one of SPLITS shares of the inputs; the last of them adds up.

    Grid: (cdiv(num_rows, BLOCK_N), cdiv(num_tokens, BLOCK_M), SPLITS).
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # `code_bias` of 4 bits; what a function returns is no constant to every compiler.
    ABOVE: tl.constexpr = 0.0 if DTYPE.is_fp32() else 1024.0 if DTYPE.is_fp16() else 128.0  # pyright: ignore
    PARTS: tl.constexpr = 1 if GROUP % 128 == 0 else 2 if GROUP % 64 == 0 else 4  # pyright: ignore[reportAssignmentType]
    WIDTH: tl.constexpr = 128 // PARTS
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_mask = token < num_tokens
    word_ptrs = words_ptr + weight_row[:, None] * stride_words_row + tl.arange(0, 16)[None, :]
    column = tl.arange(0, WIDTH)
    x_ptrs = x_ptr + token[None, :].to(tl.int64) * stride_x_token + column[:, None]
    scale_ptrs = scales_ptr + weight_row * stride_scales_row
    origin_ptrs = scale_ptrs if ORIGIN == "none" else origins_ptr + weight_row * stride_origins_row
    per_split = (num_chunks + SPLITS - 1) // SPLITS
    begin = tl.program_id(2) * per_split
    end = tl.minimum(begin + per_split, num_chunks)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for chunk in range(begin, end):
        low = tl.load(word_ptrs + chunk * (4 * BITS))
        if BITS == 8:
            high = tl.load(word_ptrs + chunk * (4 * BITS) + 16)
        for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
            first = chunk * 128 + part * WIDTH
            if EVEN_K:
                x = tl.load(x_ptrs + first, mask=token_mask[None, :], other=0.0)
                group = first // GROUP if GROUP > 0 else 0
            else:
                inside = (first + column < num_columns)[:, None]
                x = tl.load(x_ptrs + first, mask=token_mask[None, :] & inside, other=0.0)
                # Columns past the end are 0, whatever their scale.
                group = tl.minimum(first, num_columns - 1) // GROUP if GROUP > 0 else 0
            scale = tl.load(scale_ptrs + group * stride_scales_group).to(tl.float32)
            if ORIGIN == "none":
                zero_low = tl.full([1, 1], ABOVE + (8.0 if BITS == 4 else 0.0), DTYPE)
                zero_high = tl.full([1, 1], ABOVE + 8.0, DTYPE)
            elif ORIGIN == "integer":
                zero = tl.load(origin_ptrs + group * stride_origins_group)
                zero_low = ((zero & 15).to(tl.float32) + ABOVE).to(DTYPE)[:, None]
                zero_high = ((zero >> 4).to(tl.float32) + ABOVE).to(DTYPE)[:, None]
            else:
                zero_low = tl.full([1, 1], ABOVE, DTYPE)
                zero_high = tl.full([1, 1], ABOVE, DTYPE)
            # "ieee": float32 is not to be rounded to TF32.
            sums = tl.dot(_wide_codes(low, zero_low, magic, part, PARTS, DTYPE, BLOCK_N), x, input_precision="ieee")
            if BITS == 8:
                codes = _wide_codes(high, zero_high, magic, part, PARTS, DTYPE, BLOCK_N)
                sums += 16.0 * tl.dot(codes, x, input_precision="ieee")
            total += scale[:, None] * sums
            if ORIGIN == "float":
                minimum = tl.load(origin_ptrs + group * stride_origins_group).to(tl.float32)
                total += minimum[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
    owner = True
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tile_ptr = partial_ptr + (tile * SPLITS).to(tl.int64) * (BLOCK_N * BLOCK_M)
        total, owner = sum_splits(total, tile_ptr, counters_ptr + tile, tl.program_id(2), SPLITS)
    if owner:
        store_outputs(
            output_ptr,
            total,
            bias_ptr,
            residual_ptr,
            token[None, :],
            row[:, None],
            num_tokens,
            num_rows,
            stride_output_token,
            stride_residual_token,
            BIAS,
            RESIDUAL,
        )
