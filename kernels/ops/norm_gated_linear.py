"""The gate and up projections of an MLP for few tokens, the end of a norm before and SiLU-and-multiply after, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.code_launch import check_fused_product, fused_launch
from kernels.ops.code_projection import project_codes
from kernels.ops.fragment_projection import load_fragments
from kernels.ops.gated_outputs import store_gated
from kernels.ops.projection import Tiles, _split_halves, begin_early, project_halves
from kernels.reference.code_grid import CodeGrid


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "stride_square_sums_token", "magic"])
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
    scales_ptr,
    origins_ptr,
    magic,
    num_chunks,
    stride_scales_row,
    stride_scales_group,
    stride_origins_row,
    stride_origins_group,
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
    """BLOCK_N / 2 gate rows and the up rows that belong to them per program.

    With TMA, x and the weight are descriptors; with BITS, the weight is codes, and the product `project_codes`.

    Grid: (cdiv(num_outputs, BLOCK_N / 2), cdiv(num_tokens, BLOCK_M)).
    """
    HALF: tl.constexpr = BLOCK_N // 2
    lane = tl.arange(0, BLOCK_N)
    first_row = tl.program_id(0) * HALF
    row = tl.minimum(first_row + lane % HALF, num_outputs - 1) + (lane // HALF) * num_outputs
    column = first_row + tl.arange(0, HALF)
    column_mask = column < num_outputs
    first_token = tl.program_id(1) * BLOCK_M
    begin_early(weight_ptr, row, num_columns, stride_weight_row, SMALL, PDL)
    fragments = load_fragments(
        weight_ptr,
        first_row,
        num_outputs + first_row,
        2 * num_outputs,
        num_columns,
        stride_weight_row,
        EVEN_K,
        BLOCK_N,
        BLOCK_K,
        FRAGMENTS,
        FRAGMENTS_ONCE,
    )
    if BIAS:
        gate_bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
        up_bias = tl.load(bias_ptr + num_outputs + column, mask=column_mask, other=0.0).to(tl.float32)
    if BITS > 0:
        total = project_codes(
            x_ptr,
            weight_ptr,
            scales_ptr,
            origins_ptr,
            magic,
            first_row,
            num_outputs + first_row,
            2 * num_outputs,
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
        gate, up = _split_halves(total, BLOCK_M, HALF)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        gate, up = project_halves(
            fragments,
            x_ptr,
            weight_ptr,
            square_sums_ptr,
            row,
            first_row,
            num_outputs + first_row,
            2 * num_outputs,
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
        gate += gate_bias[None, :]
        up += up_bias[None, :]
    store_gated(output_ptr, gate, up, first_token, first_row, num_tokens, num_outputs, stride_output_token)


def norm_gated_linear(
    x: Tensor,
    weight: Tensor,
    square_sums: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    code_grid: CodeGrid | None = None,
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
        code_grid: makes the weight one of codes, int32 as `CodeGrid` says, on its device; for at most 16 tokens, and without
            square_sums
        tiles: how to cut the product; by default chosen from the sizes. With codes as for few tokens of `int_linear`
    Returns:
        x.dtype [num_tokens, I], contiguous. Nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    code = check_fused_product(x, weight, square_sums, bias, code_grid)
    num_tokens, num_columns = x.shape
    num_rows = weight.shape[0]
    if num_rows % 2:
        raise ValueError(f"weight has {num_rows} rows; gate and up together have an even number")

    output = torch.empty((num_tokens, num_rows // 2), dtype=x.dtype, device=x.device)
    if output.numel() == 0:
        return output
    launch, tiles, codes = fused_launch(x, weight, square_sums, code, tiles)
    grid = (triton.cdiv(num_rows // 2, tiles.block_n // 2), triton.cdiv(num_tokens, tiles.block_m))
    _norm_gated_linear_kernel[grid](
        output,
        launch.x,
        launch.weight,
        square_sums,
        bias,
        num_tokens,
        num_columns,
        num_rows // 2,
        launch.num_parts,
        eps,
        output.stride(0),
        x.stride(0),
        weight.stride(0),
        launch.stride_square_sums_token,
        *codes,
        BIAS=bias is not None,
        **launch.options,
    )
    return output
