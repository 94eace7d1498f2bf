"""Activations in 8 bits, each token with a scale, in Triton."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import as_bytes, check_float_dtype, check_tensor
from kernels.ops.kv_quantization import FLOAT32_MAX, to_e4m3
from kernels.ops.pdl import supports_pdl

MAX_COLUMNS = 65536  # of a token, which one program holds in registers
DTYPES = (torch.float8_e4m3fn, torch.int8)
FEW_TOKENS = 16  # of which several programs take one
# 448 of them are finite, and a product with 2^-10, but for a remainder of 2^-48 of it, is a normal number.
LEAST_DIVISOR = tl.constexpr(2.0**-64)


@lru_cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether the card makes such floats itself (compute capability 8.9 and newer; not Triton's interpreter)."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def _quotients(x, divisor, HARDWARE: tl.constexpr):
    """`x / divisor` to the nearest, one divisor for all of x, whose quotients are at most 448 and matter from 2^-10 on.

    Where neither the divisor's reciprocal nor what is left over can leave float32's normal numbers, by the reciprocal and two
    corrections, as a division is made (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990): the
    reciprocal is then made once. Signs are such that -0 stays; of an infinity comes NaN either way, but with a division that
    the interpreter has, which rounds a product before it adds.
    """
    if HARDWARE:
        if divisor > LEAST_DIVISOR:
            reciprocal = tl.div_rn(1.0, divisor)
            quotients = x * reciprocal
            quotients = tl.fma(tl.fma(quotients, divisor, -x), -reciprocal, quotients)
            quotients = tl.fma(tl.fma(quotients, divisor, -x), -reciprocal, quotients)
        else:
            quotients = tl.where(tl.abs(x) <= FLOAT32_MAX, tl.div_rn(x, divisor), float("nan"))
    else:
        quotients = tl.div_rn(x, divisor)
    return quotients


@triton.jit
def _largest_finite(x):
    magnitude = tl.abs(x)
    return tl.max(tl.where(magnitude <= FLOAT32_MAX, magnitude, 0.0), axis=0)


@triton.jit
def token_scale(x, INT8: tl.constexpr):
    """Of a token, fp32 [BLOCK] and 0 past its end; NaN for int8 codes of one that is not finite."""
    scale = tl.div_rn(_largest_finite(x), 127.5 if INT8 else 448.0)
    if INT8:
        row_finite = tl.min((tl.abs(x) <= FLOAT32_MAX).to(tl.int32), axis=0) == 1
        scale = tl.where(row_finite, scale, float("nan"))
    return scale


@triton.jit
def token_codes(x, scale, INT8: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes of a token or of a part of it, fp32: int8, or E4M3 as bytes."""
    # Of a scale that is 0 because the token is, or rounds to it, x itself gives codes of 0.
    quotients = _quotients(x, tl.where(scale > 0.0, scale, 1.0), HARDWARE)
    if INT8:
        codes = tl.minimum(tl.maximum(tl.where(scale >= 0.0, quotients, 0.0), -128.0), 127.0)
        # 1.5 * 2^23 leaves no room for fractions: the sum is rounded, halves to even, and ends in the code.
        codes = (codes + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    elif HARDWARE:
        codes = quotients.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = tl.where(tl.abs(x) <= FLOAT32_MAX, to_e4m3(quotients), 0x7F)
    return codes


@triton.jit
def store_codes(
    codes_ptr, scales_ptr, token, column, mask, x, COLUMNS: tl.constexpr, RUN: tl.constexpr, HARDWARE: tl.constexpr
):
    """Round a token, fp32 [BLOCK] and 0 where `mask` is not set, to codes of `codes_ptr`'s dtype (uint8: E4M3) and store it.

    Args:
        RUN: neighbours that a thread has loaded at once. More than those would be dealt out to it for a store of bytes, and a
            sum over the token would take another order.
    """
    INT8: tl.constexpr = codes_ptr.dtype.element_ty == tl.int8
    scale = token_scale(x, INT8)
    code_ptrs = tl.max_contiguous(codes_ptr + token * COLUMNS + column, [RUN])
    tl.store(code_ptrs, token_codes(x, scale, INT8, HARDWARE), mask=mask)
    tl.store(scales_ptr + token, scale)


@triton.jit
def _largest_kernel(largest_ptr, x_ptr, stride_x_token, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Raise `largest`, fp32 seen as int32, to the largest finite magnitude of a token. Grid: (num_tokens,)."""
    column = tl.arange(0, BLOCK)
    x_ptrs = x_ptr + tl.program_id(0).to(tl.int64) * stride_x_token + column
    largest = _largest_finite(tl.load(x_ptrs, mask=column < COLUMNS, other=0.0).to(tl.float32))
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
    PARTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token, or one of PARTS of it, per program, of which each looks for the scale by itself. E4M3 as bytes.

    Grid: (num_tokens, PARTS).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    INT8: tl.constexpr = codes_ptr.dtype.element_ty == tl.int8
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    x_ptr += token * stride_x_token
    x = tl.load(x_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    if PER_TOKEN:
        scale = token_scale(x, INT8)
    else:
        scale = tl.div_rn(tl.load(largest_ptr).to(tl.float32, bitcast=True), 448.0)
    if PARTS > 1:
        column = part * (BLOCK // PARTS) + tl.arange(0, BLOCK // PARTS)
        x = tl.load(x_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    # As many neighbours as a thread has loaded at once: more would be dealt out anew for a store of bytes.
    RUN: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    code_ptrs = tl.max_contiguous(codes_ptr + token * COLUMNS + column, [RUN])
    tl.store(code_ptrs, token_codes(x, scale, INT8, HARDWARE), mask=column < COLUMNS)
    if part == 0:
        tl.store(scales_ptr + token, scale)


def quantize_tokens(x: Tensor, dtype: torch.dtype, per_token: bool = True) -> tuple[Tensor, Tensor]:
    """`codes[t, k] = round(x[t, k] / s[t])` with `s[t] = max_k |x[t, k]| / L`, L half the distance of the format's ends.

    float8_e4m3fn: L = 448; infinities and NaN become NaN and have no part in the scale. int8: L = 127.5; a token with one of
    them has NaN for its scale. Halves go to the even code, but 127.5 to 127, the largest. A token of zeros has scale 0 and
    zeros. So compressed-tensors (0.20) rounds activations.

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
    num_tokens, num_columns = x.shape
    codes, scales = empty_codes(num_tokens, num_columns, dtype, x.device)
    if dtype == torch.int8 and not per_token:
        raise ValueError("int8 has a scale per token; one for all is allowed for float8_e4m3fn")
    if codes.numel() == 0:
        return codes, scales.zero_()
    block, num_warps = row_block(num_columns)
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
    # One multiprocessor is busier with making the codes of a token than with reading it.
    parts = max(1, min(8, block // 1024)) if per_token and num_tokens <= FEW_TOKENS else 1
    _quantize_tokens_kernel[(num_tokens, parts)](
        as_bytes(codes),
        scales,
        x,
        largest,
        x.stride(0),
        COLUMNS=num_columns,
        BLOCK=block,
        PARTS=parts,
        PER_TOKEN=per_token,
        HARDWARE=converts_e4m3(x.device),
        PDL=pdl,
        num_warps=num_warps,  # pyright: ignore[reportCallIssue]
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
    )
    return codes, scales


def empty_codes(num_tokens: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where codes and scales go. Raises ValueError: the dtype is none of codes, or a row is longer than a program holds."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; allowed are {', '.join(map(str, DTYPES))}")
    if num_columns > MAX_COLUMNS:
        raise ValueError(f"x has {num_columns:,} columns; at most {MAX_COLUMNS:,} are allowed")
    codes = torch.empty((num_tokens, num_columns), dtype=dtype, device=device)
    return codes, torch.empty((num_tokens, 1), dtype=torch.float32, device=device)


def row_block(num_columns: int) -> tuple[int, int]:
    """The BLOCK that holds a row, and the warps that hold it."""
    block = triton.next_power_of_2(num_columns)
    return block, min(max(block // 512, 1), 16)
