"""A linear layer over weights in NormalFloat4 with double quantization, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.ops.arrivals import arrival_counters
from kernels.ops.checks import check_tensor
from kernels.ops.linear_outputs import store_outputs
from kernels.ops.nf4_dequantize import dequantize_nf4
from kernels.ops.nf4_launch import (
    MAX_FEW_TOKENS,
    block_columns,
    check_nf4_product,
    default_nf4_tiles,
    few_tokens_options,
)
from kernels.ops.nf4_levels import LEVEL_SCALE, level_part, level_table, load_tables, table_words
from kernels.ops.nf4_projection import few_tokens_kernel
from kernels.ops.pdl import supports_pdl
from kernels.ops.projection import Tiles
from kernels.ops.split_sums import sum_splits
from kernels.reference.int_words import CHUNK

MAX_TOKENS = 256  # above, the library's product of the dequantized weight is faster


@triton.jit(do_not_specialize=["num_tokens"])
def _many_tokens_kernel(
    output_ptr,
    partial_ptr,
    counters_ptr,
    x_ptr,
    words_ptr,
    levels_ptr,
    tables_ptr,
    codes_ptr,
    steps_ptr,
    means_ptr,
    bias_ptr,
    residual_ptr,
    num_tokens,
    num_rows,
    num_columns,
    num_chunks,
    stride_output_token,
    stride_x_token,
    stride_words_row,
    stride_codes_row,
    stride_codes_block,
    stride_residual_token,
    LEVEL_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens, summed over one of SPLITS shares of the inputs; the last of them adds up.

    Grid: (cdiv(num_rows, BLOCK_N), cdiv(num_tokens, BLOCK_M), SPLITS).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: tl.constexpr = 1 if BLOCK % 128 == 0 else 2 if BLOCK % 64 == 0 else 4  # pyright: ignore[reportAssignmentType]
    WIDTH: tl.constexpr = 128 // PARTS
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_mask = token < num_tokens
    word_ptrs = words_ptr + weight_row[:, None] * stride_words_row + tl.arange(0, 16)[None, :]
    column = tl.arange(0, WIDTH)
    x_ptrs = x_ptr + token[None, :].to(tl.int64) * stride_x_token + column[:, None]
    code_ptrs = codes_ptr + weight_row * stride_codes_row
    step = tl.load(steps_ptr + weight_row).to(tl.float32)
    mean = tl.load(means_ptr + weight_row).to(tl.float32)
    tables = load_tables(tables_ptr)
    per_split = (num_chunks + SPLITS - 1) // SPLITS
    begin = tl.program_id(2) * per_split
    end = tl.minimum(begin + per_split, num_chunks)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for chunk in range(begin, end):
        words = tl.load(word_ptrs + chunk * 16)
        for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
            first = chunk * 128 + part * WIDTH
            if EVEN_K:
                x = tl.load(x_ptrs + first, mask=token_mask[None, :], other=0.0)
                block = first // BLOCK if BLOCK > 0 else 0
            else:
                inside = (first + column < num_columns)[:, None]
                x = tl.load(x_ptrs + first, mask=token_mask[None, :] & inside, other=0.0)
                # Columns past the end are 0, whatever their magnitude.
                block = tl.minimum(first, num_columns - 1) // BLOCK if BLOCK > 0 else 0
            magnitude = tl.load(code_ptrs + block * stride_codes_block).to(tl.float32) * step + mean
            levels = level_part(words, levels_ptr, tables, part, PARTS, ASM)
            if PARTS == 1:
                levels = tl.permute(levels, [0, 2, 3, 1, 4])
            elif PARTS == 2:
                levels = tl.permute(levels, [0, 2, 1, 3])
            levels = tl.reshape(levels, [BLOCK_N, WIDTH])
            # "ieee": float32 is not to be rounded to TF32.
            total += magnitude[:, None] * tl.dot(levels, x, input_precision="ieee")
    owner = True
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tile_ptr = partial_ptr + (tile * SPLITS).to(tl.int64) * (BLOCK_N * BLOCK_M)
        total, owner = sum_splits(total, tile_ptr, counters_ptr + tile, tl.program_id(2), SPLITS)
    if owner:
        store_outputs(
            output_ptr,
            total * (1.0 / LEVEL_SCALE),
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


def nf4_linear(
    x: Tensor,
    words: Tensor,
    codes: Tensor,
    steps: Tensor,
    means: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    output: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """`y = x W^T + b + r` with `W[n, k] = level[q[n, k]] * (m[n] + d[n] * c[n, b])`, b the block of k.

    A block is K / num_blocks inputs that follow one another. Levels are rounded to x.dtype, their products summed and scaled in
    fp32. Above 256 tokens the weight is rounded to x.dtype instead, for the library's product.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1)
        words: int32 [N, cdiv(K, 128) * 16], strides (any, 1): q, see `kernels.reference.nf4_words.to_nf4_chunks`
        codes: int8 [N, num_blocks], any strides: c; a block is a multiple of 32, or all of K
        steps, means: bfloat16 [N, 1], contiguous: d and m
        bias: x.dtype [N], stride (1,)
        residual: x.dtype [num_tokens, N], strides (any, 1)
        output: where to write, x.dtype [num_tokens, N], strides (any, 1); may be `residual`; a new tensor by default
        tiles: how to cut the product, by default chosen from the sizes. With block_m 1, 8 or 16 a warp takes a share of the
            inputs, and block_n is a multiple of 16; with more, block_n is from 64
    Returns:
        x.dtype [num_tokens, N]. Nothing but `output` is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    output = _check(x, words, codes, steps, means, bias, residual, output)
    if output.numel() == 0:
        return output
    num_tokens, num_columns = x.shape
    num_rows, num_blocks = codes.shape
    num_chunks = triton.cdiv(num_columns, CHUNK)
    if tiles is None and num_tokens > MAX_TOKENS:
        weight = dequantize_nf4(words, codes, steps, means, num_columns, x.dtype)
        product = F.linear(x, weight, bias)
        return output.copy_(product) if residual is None else torch.add(product, residual, out=output)
    tiles = tiles or default_nf4_tiles(num_tokens, num_rows, num_columns)
    tables = (level_table(x.dtype, x.device), table_words(x.dtype, x.device))
    tensors = (x, words, *tables, codes, steps, means, bias, residual)
    sizes = (num_tokens, num_rows, num_columns, num_chunks)
    stride_residual_token = 0 if residual is None else residual.stride(0)
    strides = [output.stride(0), x.stride(0), words.stride(0), *codes.stride(), stride_residual_token]
    flags = {"BIAS": bias is not None, "RESIDUAL": residual is not None}
    grid = (triton.cdiv(num_rows, tiles.block_n), triton.cdiv(num_tokens, tiles.block_m))
    if tiles.block_m <= MAX_FEW_TOKENS:
        options = flags | few_tokens_options(num_columns, num_blocks, x.dtype, x.device, tiles)
        few_tokens_kernel[grid](output, *tensors, *sizes, *strides, **options)
        return output
    # So that there are programs for some hundred multiprocessors, and no share is of fewer than 4 chunks.
    splits = max(1, min(8, 264 // (grid[0] * grid[1]), num_chunks // 4))
    partial_shape = (grid[0] * grid[1] * splits, tiles.block_n, tiles.block_m) if splits > 1 else (0,)
    pdl = supports_pdl(x.device)
    _many_tokens_kernel[(*grid, splits)](
        output,
        torch.empty(partial_shape, dtype=torch.float32, device=x.device),
        arrival_counters(x.device, grid[0] * grid[1]),
        *tensors,
        *sizes,
        *strides,
        LEVEL_SCALE=LEVEL_SCALE[x.dtype],
        BLOCK=block_columns(num_columns, num_blocks),
        EVEN_K=num_columns % CHUNK == 0,
        SPLITS=splits,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        ASM=x.is_cuda,
        PDL=pdl,
        num_warps=tiles.num_warps,  # pyright: ignore[reportCallIssue]  (launch options, not the kernel's)
        num_stages=tiles.num_stages,  # pyright: ignore[reportCallIssue]
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
        **flags,
    )
    return output


def _check(
    x: Tensor,
    words: Tensor,
    codes: Tensor,
    steps: Tensor,
    means: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    output: Tensor | None,
) -> Tensor:
    """The output, a new one where there is none. Raises ValueError, see `nf4_linear`."""
    check_nf4_product(x, words, codes, steps, means, bias)
    shape = (len(x), len(codes))
    if residual is not None:
        check_tensor("residual", residual, shape, x.dtype, x.device)
    if output is None:
        output = torch.empty(shape, dtype=x.dtype, device=x.device)
    check_tensor("output", output, shape, x.dtype, x.device)
    return output
