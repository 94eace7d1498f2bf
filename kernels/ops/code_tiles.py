"""The product of many tokens with a weight of integer codes, in tiles. Not an op: the kernel that `int_linear` launches.

Of up to 32 tokens codes stay in the registers, see `kernels.ops.code_register_tiles`; of more they reach the matrix unit through
shared memory, as x does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.code_register_tiles import project_in_registers, zero_halves
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


@triton.jit
def _project_through_shared(
    x_ptr,
    words_ptr,
    scales_ptr,
    origins_ptr,
    magic,
    row,
    num_rows,
    token,
    num_tokens,
    num_columns,
    begin,
    end,
    stride_x_token,
    stride_words_row,
    stride_scales_row,
    stride_scales_group,
    stride_origins_row,
    stride_origins_group,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What `project_in_registers` gives, of rows [BLOCK_N]; without PDL."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = 1 if GROUP % 128 == 0 else 2 if GROUP % 64 == 0 else 4  # pyright: ignore[reportAssignmentType]
    WIDTH: tl.constexpr = 128 // PARTS
    weight_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    token_mask = token < num_tokens
    word_ptrs = words_ptr + weight_row[:, None] * stride_words_row + tl.arange(0, 16)[None, :]
    column = tl.arange(0, WIDTH)
    x_ptrs = x_ptr + token[None, :].to(tl.int64) * stride_x_token + column[:, None]
    scale_ptrs = scales_ptr + weight_row * stride_scales_row
    origin_ptrs = scale_ptrs if ORIGIN == "none" else origins_ptr + weight_row * stride_origins_row
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
            if ORIGIN == "integer":
                zero = tl.load(origin_ptrs + group * stride_origins_group).to(tl.int32)[:, None]
            else:
                zero = tl.full([1, 1], 2 ** (BITS - 1) if ORIGIN == "none" else 0, tl.int32)
            zero_low, zero_high = zero_halves(zero, DTYPE)
            # "ieee": float32 is not to be rounded to TF32.
            sums = tl.dot(_wide_codes(low, zero_low, magic, part, PARTS, DTYPE, BLOCK_N), x, input_precision="ieee")
            if BITS == 8:
                codes = _wide_codes(high, zero_high, magic, part, PARTS, DTYPE, BLOCK_N)
                sums += 16.0 * tl.dot(codes, x, input_precision="ieee")
            total += scale[:, None] * sums
            if ORIGIN == "float":
                minimum = tl.load(origin_ptrs + group * stride_origins_group).to(tl.float32)
                total += minimum[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
    return total


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
    WARPS: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens, summed over one of SPLITS shares of the inputs; the last of them adds up.

    Grid: (cdiv(num_rows, BLOCK_N), cdiv(num_tokens, BLOCK_M), SPLITS).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    per_split = (num_chunks + SPLITS - 1) // SPLITS
    begin = tl.program_id(2) * per_split
    end = tl.minimum(begin + per_split, num_chunks)
    if IN_REGISTERS:
        total = project_in_registers(
            x_ptr,
            words_ptr,
            scales_ptr,
            origins_ptr,
            magic,
            first_row,
            num_rows,
            token,
            num_tokens,
            num_columns,
            begin,
            end,
            stride_x_token,
            stride_words_row,
            stride_scales_row,
            stride_scales_group,
            stride_origins_row,
            stride_origins_group,
            BITS,
            ORIGIN,
            GROUP,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            WARPS,
            PDL,
        )
    else:
        total = _project_through_shared(
            x_ptr,
            words_ptr,
            scales_ptr,
            origins_ptr,
            magic,
            row,
            num_rows,
            token,
            num_tokens,
            num_columns,
            begin,
            end,
            stride_x_token,
            stride_words_row,
            stride_scales_row,
            stride_scales_group,
            stride_origins_row,
            stride_origins_group,
            BITS,
            ORIGIN,
            GROUP,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
        )
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
