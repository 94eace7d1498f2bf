"""A linear layer for few tokens: the end of the norm before it, the residual sum and the next norm's begin, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.box_projection import project_box
from kernels.ops.checks import check_product, check_tensor
from kernels.ops.fragment_projection import load_fragments, project_fragments
from kernels.ops.projection import (
    Tiles,
    begin_early,
    default_tiles,
    product_launch,
    project_rows,
)
from kernels.reference.deferred_norm import DeferredNorm


@triton.jit(do_not_specialize=["num_tokens", "num_parts", "stride_square_sums_token", "stride_next_square_sums_token"])
def _norm_linear_kernel(
    output_ptr,
    x_ptr,
    weight_ptr,
    square_sums_ptr,
    bias_ptr,
    residual_ptr,
    next_norm_weight_ptr,
    scaled_ptr,
    next_square_sums_ptr,
    num_tokens,
    num_columns,
    num_rows,
    num_parts,
    eps,
    stride_output_token,
    stride_x_token,
    stride_weight_row,
    stride_square_sums_token,
    stride_residual_token,
    stride_scaled_token,
    stride_next_square_sums_token,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NEXT_NORM: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    SMALL: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    FRAGMENTS_ONCE: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens per program; with TMA, `x_ptr` and `weight_ptr` are descriptors.

    With FRAGMENTS, the number of its shares, the product is `project_fragments`.

    Grid: (cdiv(num_rows, BLOCK_N), cdiv(num_tokens, BLOCK_M)).
    """
    first_row = tl.program_id(0) * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_N)
    row_mask = row < num_rows
    first_token = tl.program_id(1) * BLOCK_M
    # Rows past the end read the last one: what they give is not stored, and no load needs a mask for them.
    weight_row = tl.minimum(row, num_rows - 1)
    token = first_token + tl.arange(0, BLOCK_M)
    mask = (token < num_tokens)[:, None] & row_mask[None, :]
    # What the sum needs at its end is asked for at its begin.
    begin_early(weight_ptr, weight_row, num_columns, stride_weight_row, SMALL, PDL)
    fragments = load_fragments(
        weight_ptr,
        first_row,
        first_row + BLOCK_N // 2,
        num_rows,
        num_columns,
        stride_weight_row,
        EVEN_K,
        BLOCK_N,
        BLOCK_K,
        FRAGMENTS,
        FRAGMENTS_ONCE,
    )
    if BIAS:
        bias = tl.load(bias_ptr + weight_row).to(tl.float32)
    if NEXT_NORM:
        norm_weight = tl.load(next_norm_weight_ptr + weight_row).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if RESIDUAL:
        residual_offset = token[:, None].to(tl.int64) * stride_residual_token + row[None, :]
        residual = tl.load(residual_ptr + residual_offset, mask=mask, other=0.0)
    if TMA:
        total = project_box(x_ptr, weight_ptr, first_row, first_token, num_columns, BLOCK_M, BLOCK_N, BLOCK_K)
    elif FRAGMENTS > 0:
        total = project_fragments(
            fragments,
            x_ptr,
            weight_ptr,
            square_sums_ptr,
            first_row,
            first_row + BLOCK_N // 2,
            num_rows,
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
            FRAGMENTS,
            FRAGMENTS_ONCE,
        )
    else:
        total = project_rows(
            x_ptr,
            weight_ptr,
            square_sums_ptr,
            weight_row,
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
    if RESIDUAL:
        total += residual.to(tl.float32)
    output_offset = token[:, None].to(tl.int64) * stride_output_token + row[None, :]
    output = total.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + output_offset, output, mask=mask)
    if NEXT_NORM:
        rounded = tl.where(row_mask[None, :], output.to(tl.float32), 0.0)
        square_sum = tl.sum(rounded * rounded, axis=1)
        sum_ptrs = next_square_sums_ptr + token * stride_next_square_sums_token + tl.program_id(0)
        tl.store(sum_ptrs, square_sum, mask=token < num_tokens)
        scaled_offset = token[:, None].to(tl.int64) * stride_scaled_token + row[None, :]
        tl.store(
            scaled_ptr + scaled_offset, (rounded * norm_weight[None, :]).to(scaled_ptr.dtype.element_ty), mask=mask
        )


def norm_linear(
    x: Tensor,
    weight: Tensor,
    square_sums: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    output: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, DeferredNorm | None]:
    """Division of a deferred norm, product, bias and residual of one linear layer, and the begin of the next norm.

    `y[t, n] = cast(sum_k x[t, k] * weight[n, k] / rms[t] + bias[n] + residual[t, n])`, in fp32 up to the cast, with
    `rms[t] = sqrt(sum_p square_sums[t, p] / K + eps)`, or 1 without `square_sums`. With `next_norm_weight` also
    `scaled = cast(y * next_norm_weight)` and the sums of squares of y, one part for every `tiles.block_n` columns.
    Every token's row is summed in the same order, whatever the other tokens: its result does not depend on `num_tokens`
    while `tiles` stay the same.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1)
        weight: x.dtype [N, K], strides (any, 1)
        square_sums: float32 [num_tokens, num_parts], strides (any, 1): of the x that lacks its norm's division, see
            `DeferredNorm`; None where x needs none
        eps: of the norm, added to the mean square
        bias: x.dtype [N], stride (1,)
        residual: x.dtype [num_tokens, N], strides (any, 1)
        next_norm_weight: x.dtype [N], stride (1,): of an RMS norm that follows; needs out_dtype to be x.dtype
        out_dtype: x.dtype by default; float32 for logits
        output: where to write, out_dtype [num_tokens, N], strides (any, 1); may be `residual`; a new tensor by default
        tiles: how to cut the product; by default chosen from the sizes
    Returns:
        out_dtype [num_tokens, N], and the deferred norm if one follows. Nothing but `output` is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    check_product(x, weight, square_sums, bias)
    num_tokens, num_columns = x.shape
    num_rows = weight.shape[0]
    if residual is not None:
        check_tensor("residual", residual, (num_tokens, num_rows), x.dtype, x.device)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if output is None:
        output = torch.empty((num_tokens, num_rows), dtype=out_dtype, device=x.device)
    check_tensor("output", output, (num_tokens, num_rows), out_dtype, x.device)
    tiles = tiles or default_tiles(num_tokens, num_rows, num_columns)
    num_programs = triton.cdiv(num_rows, tiles.block_n)
    deferred = None
    if next_norm_weight is not None:
        check_tensor("next_norm_weight", next_norm_weight, (num_rows,), x.dtype, x.device)
        if out_dtype != x.dtype:
            raise ValueError(f"out_dtype is {out_dtype} with a norm that follows; allowed is x.dtype, {x.dtype}")
        deferred = DeferredNorm(
            torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device),
            torch.empty((num_tokens, num_programs), dtype=torch.float32, device=x.device),
        )

    if output.numel() == 0:
        return output, deferred
    launch = product_launch(x, weight, square_sums, tiles, box_rows=tiles.block_n)
    _norm_linear_kernel[(num_programs, triton.cdiv(num_tokens, tiles.block_m))](
        output,
        launch.x,
        launch.weight,
        square_sums,
        bias,
        residual,
        next_norm_weight,
        deferred.scaled if deferred else None,
        deferred.square_sums if deferred else None,
        num_tokens,
        num_columns,
        num_rows,
        launch.num_parts,
        eps,
        output.stride(0),
        x.stride(0),
        weight.stride(0),
        launch.stride_square_sums_token,
        0 if residual is None else residual.stride(0),
        deferred.scaled.stride(0) if deferred else 0,
        deferred.square_sums.stride(0) if deferred else 0,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        NEXT_NORM=deferred is not None,
        **launch.options,
    )
    return output, deferred
