"""The gate and up projections of an MLP for few tokens, the end of a norm before and SiLU-and-multiply after, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_product
from kernels.ops.pdl import supports_pdl
from kernels.ops.projection import Tiles, begin_early, default_tiles, is_small, project_rows, split_halves


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "stride_square_sums_token"])
def _norm_gated_linear_kernel(
    output_ptr,
    x_ptr,
    weight_ptr,
    square_sums_ptr,
    bias_ptr,
    num_tokens,
    num_columns,
    num_outputs,
    num_parts,
    eps,
    stride_output_token,
    stride_x_token,
    stride_weight_row,
    stride_square_sums_token,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    SMALL: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N / 2 gate rows and the up rows that belong to them per program.

    Grid: (cdiv(num_outputs, BLOCK_N / 2), cdiv(num_tokens, BLOCK_M)).
    """
    HALF: tl.constexpr = BLOCK_N // 2
    lane = tl.arange(0, BLOCK_N)
    place = tl.minimum(tl.program_id(0) * HALF + lane % HALF, num_outputs - 1)
    row = place + (lane // HALF) * num_outputs
    first_token = tl.program_id(1) * BLOCK_M
    begin_early(weight_ptr, row, num_columns, stride_weight_row, SMALL, PDL)
    if BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = project_rows(
        x_ptr,
        weight_ptr,
        square_sums_ptr,
        row,
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
    )
    if BIAS:
        total += bias[None, :]
    gate, up = split_halves(total, BLOCK_M, HALF)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    token = first_token + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * HALF + tl.arange(0, HALF)
    output_offset = token[:, None].to(tl.int64) * stride_output_token + column[None, :]
    mask = (token < num_tokens)[:, None] & (column < num_outputs)[None, :]
    tl.store(output_ptr + output_offset, gated.to(output_ptr.dtype.element_ty), mask=mask)


def norm_gated_linear(
    x: Tensor,
    weight: Tensor,
    square_sums: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """Division of a deferred norm, merged gate and up product, SiLU and multiply.

    `y[t, i] = cast(silu(g[t, i]) * g[t, I + i])` with `g[t, n] = sum_k x[t, k] * weight[n, k] / rms[t] + bias[n]` in fp32
    and `rms` as in `norm_linear`; like there, a token's result does not depend on `num_tokens` while `tiles` stay the same.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1)
        weight: x.dtype [2 * I, K], strides (any, 1): the gate's rows, then the up projection's
        square_sums: float32 [num_tokens, num_parts], strides (any, 1): of the x that lacks its norm's division, see
            `DeferredNorm`; None where x needs none
        eps: of the norm, added to the mean square
        bias: x.dtype [2 * I], stride (1,)
        tiles: how to cut the product; by default chosen from the sizes
    Returns:
        x.dtype [num_tokens, I], contiguous. Nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    check_product(x, weight, square_sums, bias)
    num_tokens, num_columns = x.shape
    num_rows = weight.shape[0]
    if num_rows % 2:
        raise ValueError(f"weight has {num_rows} rows; gate and up together have an even number")

    output = torch.empty((num_tokens, num_rows // 2), dtype=x.dtype, device=x.device)
    if output.numel() == 0:
        return output
    tiles = tiles or default_tiles(num_tokens, num_rows, num_columns)
    pdl = supports_pdl(x.device)
    grid = (triton.cdiv(num_rows // 2, tiles.block_n // 2), triton.cdiv(num_tokens, tiles.block_m))
    _norm_gated_linear_kernel[grid](
        output,
        x,
        weight,
        square_sums,
        bias,
        num_tokens,
        num_columns,
        num_rows // 2,
        0 if square_sums is None else square_sums.shape[1],
        eps,
        output.stride(0),
        x.stride(0),
        weight.stride(0),
        0 if square_sums is None else square_sums.stride(0),
        BIAS=bias is not None,
        EVEN_K=num_columns % tiles.block_k == 0,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        BLOCK_PARTS=0 if square_sums is None else triton.next_power_of_2(square_sums.shape[1]),
        SMALL=is_small(weight),
        PDL=pdl,
        num_warps=tiles.num_warps,  # pyright: ignore[reportCallIssue]  (launch options, not the kernel's)
        num_stages=tiles.num_stages,  # pyright: ignore[reportCallIssue]
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
    )
    return output
