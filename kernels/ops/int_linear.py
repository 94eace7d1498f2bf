"""A linear layer over integer codes of 4 or 8 bits with a scale per group of inputs, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.ops.arrivals import arrival_counters
from kernels.ops.checks import check_tensor
from kernels.ops.code_launch import (
    MAGIC,
    MAX_FEW_TOKENS,
    MAX_REGISTER_TOKENS,
    code_arguments,
    default_int_tiles,
    few_tokens_options,
)
from kernels.ops.code_matrix import dequantize_codes
from kernels.ops.code_projection import project_codes
from kernels.ops.code_tiles import many_tokens_kernel
from kernels.ops.linear_outputs import store_outputs
from kernels.ops.pdl import supports_pdl
from kernels.ops.projection import Tiles
from kernels.reference.int_words import CHUNK

MAX_TOKENS = 256  # above, the library's product of the dequantized weight is faster


@triton.jit(do_not_specialize=["num_tokens", "magic"])
def _few_tokens_kernel(
    output_ptr,
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
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens per program. Grid: (cdiv(num_rows, BLOCK_N), cdiv(num_tokens, BLOCK_M))."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_N
    first_token = tl.program_id(1) * BLOCK_M
    total = project_codes(
        x_ptr,
        words_ptr,
        scales_ptr,
        origins_ptr,
        magic,
        first_row,
        first_row + BLOCK_N // 2,
        num_rows,
        first_token,
        num_tokens,
        num_columns,
        num_chunks,
        stride_x_token,
        stride_words_row,
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
    store_outputs(
        output_ptr,
        total,
        bias_ptr,
        residual_ptr,
        first_token + tl.arange(0, BLOCK_M)[:, None],
        first_row + tl.arange(0, BLOCK_N)[None, :],
        num_tokens,
        num_rows,
        stride_output_token,
        stride_residual_token,
        BIAS,
        RESIDUAL,
    )


def int_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bits: int,
    zero_points: Tensor | None = None,
    minimums: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    output: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """`y = x W^T + b + r` with `W[n, k] = (q[n, k] - z[n, g]) * s[n, g]`, or `q[n, k] * s[n, g] + m[n, g]`, g the group of k.

    A group is K / num_groups inputs that follow one another. Products are of codes, which are exact in every dtype; they are
    summed and scaled in fp32, for up to 16 tokens with a constant above each code (128, in float16 1024) that is taken off a
    group's sum, but of 8 bits with nothing but scales with their zero taken off. Above 256 tokens the weight is rounded to
    x.dtype instead, for the library's product.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1)
        words: int32 [N, cdiv(K, 128) * 4 * bits], strides (any, 1): codes q, see `kernels.reference.int_words.to_chunks`
        scales: float32, bfloat16 or float16 [N, num_groups], any strides; a group is a multiple of 32, or all of K
        bits: 4 or 8
        zero_points: int16 [N, num_groups], any strides; or None: with no minimums either, z = 2^(bits - 1). Not bytes: beside
            those the compiler would lay the codes out in another way than the matrix unit takes them
        minimums: scales.dtype [N, num_groups], any strides, or None
        bias: x.dtype [N], stride (1,)
        residual: x.dtype [num_tokens, N], strides (any, 1)
        output: where to write, x.dtype or float32 (for logits) [num_tokens, N], strides (any, 1); may be `residual`; a new
            tensor of x.dtype by default
        tiles: how to cut the product, by default chosen from the sizes. With block_m 1, 8 or 16 a warp takes a share of the
            inputs, and block_n is a multiple of 16; with 32 it takes 16 rows, and block_n is a multiple of those of all
            warps; with more, block_n is from 64
    Returns:
        `output`. Nothing else is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or tiles of block_m 32 have too many warps.
    """
    code = code_arguments(x, words, bits, scales, zero_points, minimums)
    num_tokens, num_columns = x.shape
    if bias is not None:
        check_tensor("bias", bias, (code.num_rows,), x.dtype, x.device)
    if residual is not None:
        check_tensor("residual", residual, (num_tokens, code.num_rows), x.dtype, x.device)
    if output is None:
        output = torch.empty((num_tokens, code.num_rows), dtype=x.dtype, device=x.device)
    out_dtype = torch.float32 if output.dtype == torch.float32 else x.dtype
    check_tensor("output", output, (num_tokens, code.num_rows), out_dtype, x.device)
    if output.numel() == 0:
        return output
    if tiles is None and num_tokens > MAX_TOKENS:
        weight = dequantize_codes(words, scales, bits, num_columns, zero_points, minimums, dtype=x.dtype)
        product = F.linear(x, weight, bias)
        return output.copy_(product if residual is None else product.add_(residual))
    tiles = tiles or default_int_tiles(num_tokens, code.num_rows, num_columns, bits)
    tensors = (x, words, code.scales, code.origins, bias, residual)
    sizes = (MAGIC[x.dtype], num_tokens, code.num_rows, num_columns, code.num_chunks)
    strides = (output.stride(0), x.stride(0), *code.strides, 0 if residual is None else residual.stride(0))
    options = code.options | {"BIAS": bias is not None, "RESIDUAL": residual is not None}
    grid = (triton.cdiv(code.num_rows, tiles.block_n), triton.cdiv(num_tokens, tiles.block_m))
    pdl = supports_pdl(x.device)
    if tiles.block_m <= MAX_FEW_TOKENS:
        _few_tokens_kernel[grid](
            output,
            *tensors,
            *sizes,
            *strides,
            **options,
            **few_tokens_options(num_columns, tiles, bits, options["ORIGIN"]),
            PDL=pdl,
            launch_pdl=pdl,  # pyright: ignore[reportCallIssue]  (a launch option, not the kernel's)
        )
        return output
    in_registers = tiles.block_m <= MAX_REGISTER_TOKENS
    if in_registers and tiles.block_n % (16 * tiles.num_warps):
        raise ValueError(
            f"tiles are {tiles}; with block_m {tiles.block_m} block_n is a multiple of 16 rows of {tiles.num_warps} warps"
        )
    # Programs with tiles in shared memory that wait for the kernel before keep their place from it: measured on an H200 with the
    # 8B, a step of 64 requests takes 9 % more time so.
    pdl = pdl and in_registers
    splits = _num_splits(grid[0] * grid[1], code.num_chunks)
    partial_shape = (grid[0] * grid[1] * splits, tiles.block_n, tiles.block_m) if splits > 1 else (0,)
    many_tokens_kernel[(*grid, splits)](
        output,
        torch.empty(partial_shape, dtype=torch.float32, device=x.device),
        arrival_counters(x.device, grid[0] * grid[1]),
        *tensors,
        *sizes,
        *strides,
        **options,
        EVEN_K=num_columns % CHUNK == 0,
        SPLITS=splits,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        WARPS=tiles.num_warps,
        IN_REGISTERS=in_registers,
        PDL=pdl,
        num_warps=tiles.num_warps,  # pyright: ignore[reportCallIssue]
        num_stages=tiles.num_stages,  # pyright: ignore[reportCallIssue]
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
    )
    return output


def _num_splits(num_programs: int, num_chunks: int) -> int:
    """So that there are programs for some hundred multiprocessors, and no share is of fewer than 4 chunks."""
    return max(1, min(8, 264 // num_programs, num_chunks // 4))
