"""Root-mean-square normalisation with its result in 8 bits, in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import as_bytes, check_float_dtype, check_tensor
from kernels.ops.pdl import supports_pdl
from kernels.ops.quantize_tokens import converts_e4m3, empty_codes, row_block, store_codes
from kernels.ops.rms_norm import normed_row


@triton.jit
def _rms_norm_quantize_kernel(
    codes_ptr,
    scales_ptr,
    x_ptr,
    weight_ptr,
    eps,
    stride_x_token,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token per program, its row in registers: read once, written once. E4M3 as bytes. Grid: (num_tokens,)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * stride_x_token + column, mask=mask, other=0.0).to(tl.float32)
    output = normed_row(x, weight, eps, HIDDEN).to(tl.float32)
    RUN: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    store_codes(codes_ptr, scales_ptr, token, column, mask, output, HIDDEN, RUN, HARDWARE)


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_tokens(rms_norm(x, weight, eps), dtype)`, without the tensor in between.

    That is rounded to x.dtype all the same, so that codes and scales are those of the two ops in a row.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, hidden], strides (any, 1), hidden at most 65,536
        weight: x.dtype [hidden], stride (1,)
        eps: added to the mean square
        dtype: float8_e4m3fn or int8
    Returns:
        codes, dtype [num_tokens, hidden], and scales, float32 [num_tokens, 1], both contiguous; nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    check_float_dtype("x", x)
    check_tensor("x", x, (None, None), x.dtype, x.device)
    num_tokens, hidden = x.shape
    check_tensor("weight", weight, (hidden,), x.dtype, x.device)
    codes, scales = empty_codes(num_tokens, hidden, dtype, x.device)
    if codes.numel() == 0:
        return codes, scales.zero_()
    block, num_warps = row_block(hidden)
    pdl = supports_pdl(x.device)
    _rms_norm_quantize_kernel[(num_tokens,)](
        as_bytes(codes),
        scales,
        x,
        weight,
        eps,
        x.stride(0),
        HIDDEN=hidden,
        BLOCK=block,
        HARDWARE=converts_e4m3(x.device),
        PDL=pdl,
        num_warps=num_warps,  # pyright: ignore[reportCallIssue]  (launch options, not the kernel's)
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
    )
    return codes, scales
