"""Root-mean-square normalisation, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_float_dtype, check_tensor
from kernels.ops.pdl import supports_pdl

MAX_HIDDEN = 65536


@triton.jit
def normed_row(x, weight, eps, HIDDEN: tl.constexpr):
    """fp32 [BLOCK] of a token, 0 past HIDDEN, to its norm in the weight's dtype."""
    mean_square = tl.sum(x * x, axis=0) / HIDDEN
    # Rounded to the weight's dtype before the product, as the reference does.
    normalized = (x / tl.sqrt(mean_square + eps)).to(weight.dtype)
    return (normalized.to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@triton.jit
def _rms_norm_kernel(
    output_ptr,
    x_ptr,
    weight_ptr,
    eps,
    stride_output_token,
    stride_x_token,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token per program, its row in registers: read once, written once. Grid: (num_tokens,)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * stride_x_token + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(output_ptr + token * stride_output_token + column, normed_row(x, weight, eps, HIDDEN), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square, then scale each column.

    `y[t, i] = cast(x[t, i] / sqrt(mean_j(x[t, j]^2) + eps)) * weight[i]`, in fp32 up to the cast to `x.dtype`.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, hidden], strides (any, 1)
        weight: x.dtype [hidden], stride (1,)
        eps: added to the mean square
    Returns:
        x.dtype [num_tokens, hidden], contiguous; nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above, or hidden is above 65,536.
    """
    check_float_dtype("x", x)
    check_tensor("x", x, (None, None), x.dtype, x.device)
    num_tokens, hidden = x.shape
    check_tensor("weight", weight, (hidden,), x.dtype, x.device)
    if hidden > MAX_HIDDEN:
        raise ValueError(f"x has {hidden} columns; at most {MAX_HIDDEN} are allowed")

    output = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if output.numel() == 0:
        return output
    block = triton.next_power_of_2(hidden)
    pdl = supports_pdl(x.device)
    _rms_norm_kernel[(num_tokens,)](
        output,
        x,
        weight,
        eps,
        output.stride(0),
        x.stride(0),
        HIDDEN=hidden,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),  # pyright: ignore[reportCallIssue]  (launch options, not the kernel's)
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
    )
    return output
