"""What the kernels for few tokens share: a product that reads rows of a weight once, against every token.

Not an op: device functions, and how a product is cut.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.pdl import prefetch_rows

# Of a weight whose reading is a matter of latency rather than of bandwidth.
SMALL_WEIGHT_BYTES = 8 * 2**20


class Tiles(NamedTuple):
    """How a product is cut: a program holds `block_n` weight rows against `block_m` tokens, `block_k` columns at a time."""

    block_m: int  # 1, or a power of two from 16 (a matrix unit's least)
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def default_tiles(num_tokens: int, num_rows: int, num_columns: int) -> Tiles:
    """Tiles for a shape that was not measured."""
    if num_tokens == 1:
        return Tiles(1, 4, min(2048, max(16, triton.next_power_of_2(num_columns))), 4, 2)
    block_m = min(64, max(16, triton.next_power_of_2(num_tokens)))
    # Within the shared memory of a consumer card, in float32 too.
    return Tiles(block_m, 32, min(128, max(16, triton.next_power_of_2(num_columns))), 4, 3 if block_m <= 32 else 2)


def is_small(weight: Tensor) -> bool:
    """Whether a weight is to be fetched ahead: small, and in rows that the copy engine takes, of 16 bytes and aligned."""
    row_stride_bytes = weight.stride(0) * weight.element_size()
    aligned = weight.data_ptr() % 16 == 0 and row_stride_bytes % 16 == 0
    return weight.nbytes <= SMALL_WEIGHT_BYTES and aligned and weight.shape[1] * weight.element_size() >= 16


@triton.jit
def project_rows(
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
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """`y[t, n] = sum_k x[t, k] * weight[weight_row[n], k]` in fp32 [BLOCK_M, BLOCK_N]; x past `num_tokens` counts as 0.

    With BLOCK_PARTS, x lacks the division of its norm: y is divided by `sqrt(sum_p square_sums[t, p] / num_columns + eps)`.
    """
    token = first_token + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    token_mask = token < num_tokens
    x_ptrs = x_ptr + token[:, None].to(tl.int64) * stride_x_token + column[None, :]
    weight_ptrs = weight_ptr + weight_row[:, None].to(tl.int64) * stride_weight_row + column[None, :]
    if BLOCK_M == 1:
        wide = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if BLOCK_PARTS > 0:
        # Asked for before the loop and needed after it: nobody waits for them.
        part = tl.arange(0, BLOCK_PARTS)
        square_sums = tl.load(
            square_sums_ptr + token[:, None] * stride_square_sums_token + part[None, :],
            mask=token_mask[:, None] & (part < num_parts)[None, :],
            other=0.0,
        )
    for start in range(0, num_columns, BLOCK_K):
        if EVEN_K:
            weight = tl.load(weight_ptrs + start)
            x = tl.load(x_ptrs + start, mask=token_mask[:, None], other=0.0)
        else:
            column_mask = start + column < num_columns
            weight = tl.load(weight_ptrs + start, mask=column_mask[None, :], other=0.0)
            x = tl.load(x_ptrs + start, mask=token_mask[:, None] & column_mask[None, :], other=0.0)
        if BLOCK_M == 1:
            wide += weight.to(tl.float32) * x.to(tl.float32)
        else:
            # "ieee": float32 products are not to be rounded to TF32; other dtypes ignore it.
            total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    if BLOCK_M == 1:
        total = tl.sum(wide, axis=1)[None, :]
    if BLOCK_PARTS > 0:
        total = total / tl.sqrt(tl.sum(square_sums, axis=1) / num_columns + eps)[:, None]
    return total


@triton.jit
def begin_early(weight_ptr, weight_row, num_columns, stride_weight_row, SMALL: tl.constexpr, PDL: tl.constexpr):
    """Let the next kernel start, and ask for the weights, while the kernel before this one ends.

    A SMALL weight is a matter of latency, and all of it is fetched ahead; a large one keeps the memory busy by itself.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if SMALL:
            row_ptrs = weight_ptr + weight_row.to(tl.int64) * stride_weight_row
            prefetch_rows(row_ptrs, num_columns * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8) // 16 * 16)


@triton.jit
def split_halves(total, BLOCK_M: tl.constexpr, HALF: tl.constexpr):
    """[BLOCK_M, 2 * HALF] -> its left and right half."""
    return tl.split(tl.permute(tl.reshape(total, [BLOCK_M, 2, HALF]), [0, 2, 1]))
