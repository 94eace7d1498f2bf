"""The gate and up projections of an MLP over weights in NormalFloat4, for few tokens, and SiLU-and-multiply, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gated_outputs import store_gated
from kernels.ops.nf4_launch import MAX_FEW_TOKENS, check_nf4_product, default_nf4_tiles, few_tokens_options
from kernels.ops.nf4_levels import level_table, table_words
from kernels.ops.nf4_projection import project_nf4
from kernels.ops.projection import Tiles, _split_halves
from kernels.reference.int_words import CHUNK


@triton.jit(do_not_specialize=["num_tokens"])
def _nf4_gated_linear_kernel(
    output_ptr,
    x_ptr,
    words_ptr,
    levels_ptr,
    tables_ptr,
    codes_ptr,
    steps_ptr,
    means_ptr,
    bias_ptr,
    num_tokens,
    num_outputs,
    num_columns,
    num_chunks,
    stride_output_token,
    stride_x_token,
    stride_words_row,
    stride_codes_row,
    stride_codes_block,
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
    """BLOCK_N / 2 gate rows and the up rows that belong to them per program.

    Grid: (cdiv(num_outputs, BLOCK_N / 2), cdiv(num_tokens, BLOCK_M)).
    """
    HALF: tl.constexpr = BLOCK_N // 2
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * HALF
    first_token = tl.program_id(1) * BLOCK_M
    total = project_nf4(
        x_ptr,
        words_ptr,
        levels_ptr,
        tables_ptr,
        codes_ptr,
        steps_ptr,
        means_ptr,
        first_row,
        num_outputs + first_row,
        2 * num_outputs,
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
    gate, up = _split_halves(total * (1.0 / LEVEL_SCALE), BLOCK_M, HALF)
    if BIAS:
        column = first_row + tl.arange(0, HALF)
        gate += tl.load(bias_ptr + column, mask=column < num_outputs, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + num_outputs + column, mask=column < num_outputs, other=0.0).to(tl.float32)[None, :]
    store_gated(output_ptr, gate, up, first_token, first_row, num_tokens, num_outputs, stride_output_token)


def nf4_gated_linear(
    x: Tensor,
    words: Tensor,
    codes: Tensor,
    steps: Tensor,
    means: Tensor,
    bias: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """Merged gate and up product with a weight in NormalFloat4, SiLU and multiply.

    `y[t, i] = cast(silu(g[t, i]) * g[t, I + i])` with `g[t, n] = sum_k x[t, k] * W[n, k] + bias[n]` in fp32 and W of
    `nf4_linear`, whose levels are rounded to x.dtype.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1), num_tokens at most 16
        words, codes, steps, means: as `nf4_linear` takes them, of 2 * I rows: the gate's, then the up projection's
        bias: x.dtype [2 * I], stride (1,)
        tiles: how to cut the product, by default chosen from the sizes: a warp takes a share of the inputs, block_m is 1, 8 or
            16 and block_n a multiple of 16
    Returns:
        x.dtype [num_tokens, I], contiguous. Nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    check_nf4_product(x, words, codes, steps, means, bias)
    num_tokens, num_columns = x.shape
    num_rows, num_blocks = codes.shape
    if num_rows % 2:
        raise ValueError(f"codes have {num_rows} rows; gate and up together have an even number")
    if num_tokens > MAX_FEW_TOKENS:
        raise ValueError(f"x has {num_tokens} tokens; at most {MAX_FEW_TOKENS} are allowed")
    output = torch.empty((num_tokens, num_rows // 2), dtype=x.dtype, device=x.device)
    if output.numel() == 0:
        return output
    tiles = tiles or default_nf4_tiles(num_tokens, num_rows, num_columns)
    grid = (triton.cdiv(num_rows // 2, tiles.block_n // 2), triton.cdiv(num_tokens, tiles.block_m))
    _nf4_gated_linear_kernel[grid](
        output,
        x,
        words,
        level_table(x.dtype, x.device),
        table_words(x.dtype, x.device),
        codes,
        steps,
        means,
        bias,
        num_tokens,
        num_rows // 2,
        num_columns,
        triton.cdiv(num_columns, CHUNK),
        output.stride(0),
        x.stride(0),
        words.stride(0),
        *codes.stride(),
        BIAS=bias is not None,
        **few_tokens_options(num_columns, num_blocks, x.dtype, x.device, tiles),
    )
    return output
