"""What the kernels for few tokens share: a product that reads rows of a weight once, against every token.

Not an op: device functions, and how a product is cut.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.ops.box_projection import project_boxes
from kernels.ops.fragment_projection import (
    MAX_SHARE_REGISTERS,
    STEP,
    fragment_options,
    project_fragments,
    step_registers,
)
from kernels.ops.pdl import prefetch_rows, supports_pdl

# Of a weight whose reading is a matter of latency rather than of bandwidth.
SMALL_WEIGHT_BYTES = 8 * 2**20
MIN_BOX_ROWS = 64  # of a weight, below which Hopper's matrix unit cannot take them as they lie in shared memory


class Tiles(NamedTuple):
    """How a product is cut: a program holds `block_n` weight rows against `block_m` tokens, `block_k` columns at a time."""

    block_m: int  # 1, or a power of two from 16 (a matrix unit's least)
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    # Whether the product is `project_fragments`: of 8 or 16 tokens, with a share of the columns for each warp, of which
    # `block_k` are in its registers at once. There are no stages then.
    fragments: bool = False


def default_tiles(num_tokens: int, num_rows: int, num_columns: int) -> Tiles:
    """Tiles for a shape that was not measured."""
    if num_tokens == 1:
        return Tiles(1, 4, min(2048, max(16, triton.next_power_of_2(num_columns))), 4, 2)
    block_m = min(64, max(16, triton.next_power_of_2(num_tokens)))
    # Within the shared memory of a consumer card, in float32 too.
    return Tiles(block_m, 32, min(128, max(16, triton.next_power_of_2(num_columns))), 4, 3 if block_m <= 32 else 2)


def fragment_tiles(num_tokens: int, num_columns: int, block_n: int, shares: int) -> Tiles | None:
    """Tiles with which each warp asks for its whole share of the columns at once; None where its registers cannot hold it."""
    block_m = 8 if num_tokens <= 8 else 16
    num_steps = max(1, triton.cdiv(triton.cdiv(num_columns, STEP), shares))
    if num_steps * step_registers(block_m, block_n) > MAX_SHARE_REGISTERS:
        return None
    return Tiles(block_m, block_n, num_steps * STEP, shares, 1, fragments=True)


def is_small(weight: Tensor) -> bool:
    """Whether a weight is to be fetched ahead: small, and in rows that the copy engine takes."""
    return weight.nbytes <= SMALL_WEIGHT_BYTES and _has_rows_to_copy(weight)


@lru_cache
def supports_tma(device: torch.device) -> bool:
    """Whether the card has a copy engine for boxes of a matrix, and a matrix unit that reads what it leaves."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


class ProductLaunch(NamedTuple):
    """What the launch of a kernel with a product takes for it."""

    x: Tensor | TensorDescriptor
    weight: Tensor | TensorDescriptor
    num_parts: int
    stride_square_sums_token: int
    options: dict[str, Any]  # the kernel's constants that end in PDL, and those of the launch


def product_launch(
    x: Tensor, weight: Tensor, square_sums: Tensor | None, tiles: Tiles, *, box_rows: int
) -> ProductLaunch:
    """Args:
    box_rows: weight rows that a program's one or two boxes have, see `project_box`.
    Raises ValueError: these tiles are none for fragments.
    """
    cut = {"FRAGMENTS": 0, "FRAGMENTS_ONCE": False}
    if tiles.fragments:
        if tiles.block_m not in (8, 16) or tiles.block_n % 16 or tiles.block_k < STEP or tiles.block_k % STEP:
            raise ValueError(
                f"tiles are {tiles}; with fragments block_m is 8 or 16, block_n a multiple of 16 and block_k of {STEP}"
            )
        cut = fragment_options(x.shape[1], tiles.num_warps, tiles.block_k)
    tma = _uses_tma(x, weight, square_sums, tiles, box_rows)
    pdl = supports_pdl(x.device)
    num_parts = 0 if square_sums is None else square_sums.shape[1]
    options = {
        "EVEN_K": x.shape[1] % tiles.block_k == 0,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "BLOCK_PARTS": triton.next_power_of_2(num_parts) if num_parts else 0,
        # A share that is asked for all at once needs no fetching ahead.
        "SMALL": is_small(weight) and not cut["FRAGMENTS_ONCE"],
        "TMA": tma,
        "PDL": pdl,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "launch_pdl": pdl,
    } | cut
    return ProductLaunch(
        _boxes_of(x, tiles.block_m, tiles.block_k) if tma else x,
        _boxes_of(weight, box_rows, tiles.block_k) if tma else weight,
        num_parts,
        0 if square_sums is None else square_sums.stride(0),
        options,
    )


def _uses_tma(x: Tensor, weight: Tensor, square_sums: Tensor | None, tiles: Tiles, box_rows: int) -> bool:
    """Whether weight rows go through the copy engine, and none of them through registers.

    What small weights wait for is latency, and they keep to pointers; so do float32 products, which the matrix unit rounds.
    """
    return (
        supports_tma(x.device)
        and not tiles.fragments
        and tiles.block_m >= 16
        and box_rows >= MIN_BOX_ROWS
        and x.element_size() == 2
        and square_sums is None
        and weight.nbytes > SMALL_WEIGHT_BYTES
        and _has_rows_to_copy(x)
        and _has_rows_to_copy(weight)
    )


def _boxes_of(tensor: Tensor, box_rows: int, box_columns: int) -> TensorDescriptor:
    """What a kernel loads boxes of `tensor` by; what lies outside of it reads as 0."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [box_rows, box_columns])


def _has_rows_to_copy(tensor: Tensor) -> bool:
    """Whether rows are of 16 bytes at least, and aligned to them."""
    row_stride_bytes = tensor.stride(0) * tensor.element_size()
    aligned = tensor.data_ptr() % 16 == 0 and row_stride_bytes % 16 == 0 and row_stride_bytes > 0
    return aligned and tensor.shape[1] * tensor.element_size() >= 16


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
def _split_halves(total, BLOCK_M: tl.constexpr, HALF: tl.constexpr):
    """[BLOCK_M, 2 * HALF] -> its left and right half."""
    return tl.split(tl.permute(tl.reshape(total, [BLOCK_M, 2, HALF]), [0, 2, 1]))


@triton.jit
def project_halves(
    fragments,
    x_ptr,
    weight_ptr,
    square_sums_ptr,
    weight_row,
    first_row,
    second_row,
    num_rows,
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
    TMA: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    FRAGMENTS_ONCE: tl.constexpr,
):
    """`project_rows` of the BLOCK_N / 2 rows from `first_row` on, and of those from `second_row` on: two results.

    With TMA `x_ptr` and `weight_ptr` are descriptors; without it `weight_row` names the rows, one half after the other. With
    FRAGMENTS the product is `project_fragments`, which takes `fragments`.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    if TMA:
        left, right = project_boxes(
            x_ptr, weight_ptr, first_row, second_row, first_token, num_columns, BLOCK_M, HALF, BLOCK_K
        )
    elif FRAGMENTS > 0:
        total = project_fragments(
            fragments,
            x_ptr,
            weight_ptr,
            square_sums_ptr,
            first_row,
            second_row,
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
        left, right = _split_halves(total, BLOCK_M, HALF)
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
        left, right = _split_halves(total, BLOCK_M, HALF)
    return left, right


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
