"""A weight of integer codes of 4 or 8 bits as a matrix of floats, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.int_words import CHUNK


@triton.jit
def _dequantize_codes_kernel(
    weight_ptr,
    words_ptr,
    scales_ptr,
    origins_ptr,
    num_rows,
    num_columns,
    stride_words_row,
    stride_scales_row,
    stride_scales_group,
    stride_origins_row,
    stride_origins_group,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A chunk of BLOCK_N rows per program. Grid: (cdiv(num_rows, BLOCK_N), num_chunks)."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    lane = tl.arange(0, 128)
    column = chunk * 128 + lane
    wide_row = row[:, None].to(tl.int64)
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    word_ptrs = words_ptr + wide_row * stride_words_row + (chunk * 4 * BITS + lane % 32 // 2)[None, :]
    shift = (4 * (lane // 32) + 16 * (lane % 2))[None, :]
    codes = (tl.load(word_ptrs, mask=mask, other=0) >> shift) & 15
    if BITS == 8:
        codes += ((tl.load(word_ptrs + 16, mask=mask, other=0) >> shift) & 15) * 16
    group = (column // GROUP if GROUP > 0 else column * 0)[None, :]
    scale_ptrs = scales_ptr + wide_row * stride_scales_row + group * stride_scales_group
    scale = tl.load(scale_ptrs, mask=mask, other=0.0).to(tl.float32)
    origin_offset = wide_row * stride_origins_row + group * stride_origins_group
    if ORIGIN == "float":
        minimum = tl.load(origins_ptr + origin_offset, mask=mask, other=0.0).to(tl.float32)
        weight = codes.to(tl.float32) * scale + minimum
    elif ORIGIN == "integer":
        zero = tl.load(origins_ptr + origin_offset, mask=mask, other=0).to(tl.int32)
        weight = (codes - zero).to(tl.float32) * scale
    else:
        weight = (codes - 2 ** (BITS - 1)).to(tl.float32) * scale
    tl.store(weight_ptr + wide_row * num_columns + column[None, :], weight.to(weight_ptr.dtype.element_ty), mask=mask)


def dequantize_codes(
    words: Tensor,
    scales: Tensor,
    bits: int,
    num_columns: int,
    zero_points: Tensor | None = None,
    minimums: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """`W[n, k] = (q[n, k] - z[n, g]) * s[n, g]`, or `q[n, k] * s[n, g] + m[n, g]`, rounded once to `dtype`.

    Args: as `int_linear`, which has checked them.
    Returns:
        `dtype` [N, num_columns], contiguous. Nothing is mutated.
    """
    num_rows, num_groups = scales.shape
    origins = minimums if zero_points is None else zero_points
    weight = torch.empty((num_rows, num_columns), dtype=dtype, device=words.device)
    block_n = 8
    _dequantize_codes_kernel[(triton.cdiv(num_rows, block_n), triton.cdiv(num_columns, CHUNK))](
        weight,
        words,
        scales,
        origins,
        num_rows,
        num_columns,
        words.stride(0),
        *scales.stride(),
        *(origins.stride() if origins is not None else (0, 0)),
        BITS=bits,
        ORIGIN="float" if minimums is not None else "integer" if zero_points is not None else "none",
        GROUP=num_columns // num_groups if num_groups > 1 else 0,
        BLOCK_N=block_n,
    )
    return weight
