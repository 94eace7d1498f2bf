"""A weight in NormalFloat4 as a matrix of floats. Not an op: what `nf4_linear` does for many tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.nf4_levels import level_table
from kernels.reference.int_words import CHUNK

_BLOCK_N = 8


@triton.jit
def _dequantize_kernel(
    weight_ptr,
    words_ptr,
    levels_ptr,
    codes_ptr,
    steps_ptr,
    means_ptr,
    num_rows,
    num_columns,
    stride_words_row,
    stride_codes_row,
    stride_codes_block,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A chunk of BLOCK_N rows per program. Grid: (cdiv(num_rows, BLOCK_N), num_chunks)."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    lane = tl.arange(0, 128)
    column = chunk * 128 + lane
    wide_row = row[:, None].to(tl.int64)
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    words = tl.load(
        words_ptr + wide_row * stride_words_row + (chunk * 16 + lane % 32 // 2)[None, :], mask=mask, other=0
    )
    level = tl.load(levels_ptr + ((words >> (8 * (lane // 32) + 4 * (lane % 2))[None, :]) & 15))
    block = (column // BLOCK if BLOCK > 0 else column * 0)[None, :]
    code = tl.load(codes_ptr + wide_row * stride_codes_row + block * stride_codes_block, mask=mask, other=0)
    row_mask = (row < num_rows)[:, None]
    step = tl.load(steps_ptr + wide_row, mask=row_mask, other=0.0).to(tl.float32)
    mean = tl.load(means_ptr + wide_row, mask=row_mask, other=0.0).to(tl.float32)
    weight = level * (code.to(tl.float32) * step + mean)
    tl.store(weight_ptr + wide_row * num_columns + column[None, :], weight.to(weight_ptr.dtype.element_ty), mask=mask)


def dequantize_nf4(
    words: Tensor, codes: Tensor, steps: Tensor, means: Tensor, num_columns: int, dtype: torch.dtype
) -> Tensor:
    """`W[n, k] = level[q[n, k]] * (m[n] + d[n] * c[n, b])` in fp32, rounded once to `dtype`.

    Args: as `nf4_linear`, which has checked them.
    Returns:
        `dtype` [N, num_columns], contiguous. Nothing is mutated.
    """
    num_rows, num_blocks = codes.shape
    weight = torch.empty((num_rows, num_columns), dtype=dtype, device=words.device)
    _dequantize_kernel[(triton.cdiv(num_rows, _BLOCK_N), triton.cdiv(num_columns, CHUNK))](
        weight,
        words,
        level_table(torch.float32, words.device),
        codes,
        steps,
        means,
        num_rows,
        num_columns,
        words.stride(0),
        *codes.stride(),
        BLOCK=num_columns // num_blocks if num_blocks > 1 else 0,
        BLOCK_N=_BLOCK_N,
    )
    return weight
