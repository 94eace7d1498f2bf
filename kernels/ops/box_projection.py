"""The product of rows that go through the copy engine, in boxes. Not an op: device functions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def project_box(
    x_desc,
    weight_desc,
    first_row,
    first_token,
    num_columns,
    BLOCK_M: tl.constexpr,
    BOX_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `kernels.ops.projection.project_rows` of rows that follow one another, through the copy engine: [BLOCK_M, BOX_ROWS].

    The weight is the left operand, since the matrix unit takes 64 rows of that at least, and 8 columns of the other.
    """
    total = tl.zeros([BOX_ROWS, BLOCK_M], dtype=tl.float32)
    for start in range(0, num_columns, BLOCK_K):
        weight = weight_desc.load([first_row, start])
        x = x_desc.load([first_token, start])
        total = tl.dot(weight, tl.trans(x), total)
    return tl.trans(total)


@triton.jit
def project_boxes(
    x_desc,
    weight_desc,
    first_row,
    second_row,
    first_token,
    num_columns,
    BLOCK_M: tl.constexpr,
    BOX_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`project_box` of two boxes against the same x: two times [BLOCK_M, BOX_ROWS]."""
    first_total = tl.zeros([BOX_ROWS, BLOCK_M], dtype=tl.float32)
    second_total = tl.zeros([BOX_ROWS, BLOCK_M], dtype=tl.float32)
    for start in range(0, num_columns, BLOCK_K):
        first = weight_desc.load([first_row, start])
        second = weight_desc.load([second_row, start])
        x = tl.trans(x_desc.load([first_token, start]))
        first_total = tl.dot(first, x, first_total)
        second_total = tl.dot(second, x, second_total)
    return tl.trans(first_total), tl.trans(second_total)
