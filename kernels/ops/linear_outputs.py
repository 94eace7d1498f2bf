"""The end of a linear layer's kernel: bias and residual, and the output. Not an op: a device function."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_outputs(
    output_ptr,
    total,
    bias_ptr,
    residual_ptr,
    token,
    row,
    num_tokens,
    num_rows,
    stride_output_token,
    stride_residual_token,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """fp32 products, tokens along one axis and rows along the other as `token` and `row` have them, to the layer's output."""
    mask = (token < num_tokens) & (row < num_rows)
    if BIAS:
        total += tl.load(bias_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)
    if RESIDUAL:
        residual_ptrs = residual_ptr + token.to(tl.int64) * stride_residual_token + row
        total += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    output_ptrs = output_ptr + token.to(tl.int64) * stride_output_token + row
    tl.store(output_ptrs, total.to(output_ptr.dtype.element_ty), mask=mask)
