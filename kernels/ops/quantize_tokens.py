"""Activations in 8 bits, each token with a scale, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import as_bytes, check_float_dtype, check_tensor
from kernels.ops.kv_quantization import FLOAT32_MAX, to_e4m3
from kernels.ops.pdl import supports_pdl

MAX_COLUMNS = 65536  # of a token, which one program holds in registers
DTYPES = (torch.float8_e4m3fn, torch.int8)


@triton.jit
def _largest_kernel(largest_ptr, x_ptr, stride_x_token, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Raise `largest`, fp32 seen as int32, to the largest finite magnitude of a token. Grid: (num_tokens,)."""
    column = tl.arange(0, BLOCK)
    x_ptrs = x_ptr + tl.program_id(0).to(tl.int64) * stride_x_token + column
    magnitude = tl.abs(tl.load(x_ptrs, mask=column < COLUMNS, other=0.0).to(tl.float32))
    largest = tl.max(tl.where(magnitude <= FLOAT32_MAX, magnitude, 0.0), axis=0)
    # Of numbers that are not negative, the bits have the same order.
    tl.atomic_max(largest_ptr, largest.to(tl.int32, bitcast=True))


@triton.jit
def _quantize_tokens_kernel(
    codes_ptr,
    scales_ptr,
    x_ptr,
    largest_ptr,
    stride_x_token,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token per program, its row in registers: read once, written once. E4M3 as bytes. Grid: (num_tokens,)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < COLUMNS
    x = tl.load(x_ptr + token * stride_x_token + column, mask=mask, other=0.0).to(tl.float32)
    finite = tl.abs(x) <= FLOAT32_MAX
    x = tl.where(finite, x, 0.0)
    magnitude = tl.abs(x)
    if codes_ptr.dtype.element_ty == tl.int8:
        row_finite = tl.min(finite.to(tl.int32), axis=0) == 1
        scale = tl.where(row_finite, tl.div_rn(tl.max(magnitude, axis=0), 127.0), 0.0)
        codes = tl.where(scale > 0.0, tl.div_rn(tl.where(row_finite, x, 0.0), tl.where(scale > 0.0, scale, 1.0)), 0.0)
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
        # 1.5 * 2^23 leaves no room for fractions: the sum is rounded, halves to even.
        codes = ((codes + 12582912.0) - 12582912.0).to(tl.int8)
        scale = tl.where(row_finite, scale, float("nan"))
    else:
        if PER_TOKEN:
            largest = tl.max(magnitude, axis=0)
        else:
            largest = tl.load(largest_ptr).to(tl.float32, bitcast=True)
        scale = tl.div_rn(largest, 448.0)
        codes = tl.where(scale > 0.0, tl.div_rn(x, tl.where(scale > 0.0, scale, 1.0)), x * 0.0)
        codes = tl.where(finite, to_e4m3(codes), 0x7F)
    tl.store(codes_ptr + token * COLUMNS + column, codes, mask=mask)
    tl.store(scales_ptr + token, scale)


def quantize_tokens(x: Tensor, dtype: torch.dtype, per_token: bool = True) -> tuple[Tensor, Tensor]:
    """`codes[t, k] = round(x[t, k] / s[t])` with `s[t] = max_k |x[t, k]| / L`, L the format's largest number.

    float8_e4m3fn: L = 448; infinities and NaN become NaN and have no part in the scale. int8: L = 127; a token with one of
    them has NaN for its scale. Halves go to the even code. A token of zeros has scale 0 and zeros.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1), K at most 65,536
        dtype: float8_e4m3fn or int8
        per_token: otherwise the scale is that of the largest of all tokens, and the same for each; of float8_e4m3fn alone
    Returns:
        codes, dtype [num_tokens, K], and scales, float32 [num_tokens, 1], both contiguous; nothing is mutated.
    Raises:
        ValueError: a dtype, stride or size is not as above.
    """
    check_float_dtype("x", x)
    check_tensor("x", x, (None, None), x.dtype, x.device)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; allowed are {', '.join(map(str, DTYPES))}")
    if dtype == torch.int8 and not per_token:
        raise ValueError("int8 has a scale per token; one for all is allowed for float8_e4m3fn")
    num_tokens, num_columns = x.shape
    if num_columns > MAX_COLUMNS:
        raise ValueError(f"x has {num_columns:,} columns; at most {MAX_COLUMNS:,} are allowed")
    codes = torch.empty((num_tokens, num_columns), dtype=dtype, device=x.device)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    if codes.numel() == 0:
        return codes, scales.zero_()
    block = triton.next_power_of_2(num_columns)
    num_warps = min(max(block // 512, 1), 16)
    largest = None
    if not per_token:
        largest = torch.zeros(1, dtype=torch.int32, device=x.device)
        _largest_kernel[(num_tokens,)](
            largest,
            x,
            x.stride(0),
            COLUMNS=num_columns,
            BLOCK=block,
            num_warps=num_warps,  # pyright: ignore[reportCallIssue]  (a launch option, not the kernel's)
        )
    pdl = per_token and supports_pdl(x.device)
    _quantize_tokens_kernel[(num_tokens,)](
        as_bytes(codes),
        scales,
        x,
        largest,
        x.stride(0),
        COLUMNS=num_columns,
        BLOCK=block,
        PER_TOKEN=per_token,
        PDL=pdl,
        num_warps=num_warps,  # pyright: ignore[reportCallIssue]
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
    )
    return codes, scales
