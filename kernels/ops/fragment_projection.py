"""The product of few tokens with a matrix of 16-bit floats, on the matrix unit and past shared memory. Not an op.

What few tokens wait for in a small layer is latency. So, as in `kernels.ops.code_projection`, each warp reads a share of the
columns by itself, straight into the registers in which the matrix unit takes them, and only the sums of the shares meet in
shared memory. A step of a share is 32 columns. Of those a lane loads 16 bytes of a row, and the same of a token: of m16n8k16
with the weight as left operand, lane 4 g + t holds rows g and g + 8, of which it has columns 8 t to 8 t + 7. The unit's first
half takes each lane's first four of them, its second half the others: columns may be multiplied in any order that both
operands have. Shapes below are cut by those names, so that no value changes its thread.

The compiler deals a load's dimensions out to lanes and warps in the order of their contiguity, and ties by its version. So all
loads claim it in falling order: the last dimension, t, g, share. So do the pointers that a step is added to: the first step adds
nothing, and the claim would go with the addition.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernels.ops.code_loads import tile_row
from kernels.ops.registers import all_registers

STEP = 32  # columns
MAX_SHARE_REGISTERS = 192  # of a thread, for operands beside the sums and all else


def step_registers(block_m: int, block_n: int) -> int:
    """Of a thread, for both operands of a step in two bytes each."""
    return block_n // 16 * 8 + block_m // 8 * 4


def fragment_options(num_columns: int, shares: int, block_k: int) -> dict[str, Any]:
    """The constants that say how a product is cut into fragments.

    Args:
        shares: of the columns, the number of warps.
        block_k: columns of a share that its warp's registers are to hold at once, a multiple of `STEP`.
    """
    steps = max(1, triton.cdiv(triton.cdiv(num_columns, STEP), shares))
    ahead = min(block_k // STEP, steps)
    once = ahead == steps
    return {
        "FRAGMENTS": shares,
        "FRAGMENTS_ONCE": once,
        "BLOCK_K": ahead * STEP,
        "EVEN_K": num_columns % (STEP * shares * (1 if once else ahead)) == 0,
        "num_stages": 1,
    } | all_registers(shares)


@triton.jit
def _share_bounds(num_columns, SHARES: tl.constexpr):
    """First step of each share, and its end: int32 [1, 1, share, 1, 1, 1].

    Shares differ by one step at most, and the last one is one of the longest: only of a longest one's last step anything can
    be missing.
    """
    num_steps = (num_columns + 31) // 32
    share = tl.arange(0, SHARES)[None, None, :, None, None, None]
    return share * num_steps // SHARES, (share + 1) * num_steps // SHARES


@triton.jit
def _share_columns(first_step):
    """int32 [t, 1, share, 1, 1, 8]: what a lane loads of a row or a token in the first step."""
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    return first_step * 32 + t * 8 + tl.arange(0, 8)[None, None, None, None, None, :]


@triton.jit
def _weight_ptrs(
    weight_ptr,
    first_row,
    second_row,
    num_rows,
    column,
    stride_weight_row,
    BLOCK_N: tl.constexpr,
):
    """[t, g, share, tile, half of a tile, 8 columns]"""
    index = tl.arange(0, BLOCK_N // 16)[None, None, None, :, None, None] * 16
    index += tl.arange(0, 2)[None, None, None, None, :, None] * 8
    index += tl.arange(0, 8)[None, :, None, None, None, None]
    row = tile_row(index, first_row, second_row, num_rows, BLOCK_N // 2)
    return tl.max_contiguous(weight_ptr + row.to(tl.int64) * stride_weight_row + column, [8, 4, 2, 1, 1, 16])


@triton.jit
def _load_step(ptrs, step, mask, column, first_step, end_step, num_columns, MASKED: tl.constexpr):
    """Step number `step` of each share; MASKED: it may reach past the share's end, or the row's, and is 0 there."""
    step_ptrs = tl.max_contiguous(ptrs + step * 32, [8, 4, 2, 1, 1, 16])
    if MASKED:
        inside = (column + step * 32 < num_columns) & (first_step + step < end_step)
        if mask is not None:
            inside = inside & mask
        loaded = tl.load(step_ptrs, mask=inside, other=0.0)
    elif mask is not None:
        loaded = tl.load(step_ptrs, mask=mask, other=0.0)
    else:
        loaded = tl.load(step_ptrs)
    return loaded


@triton.jit
def _load_first(
    ptrs,
    mask,
    column,
    first_step,
    end_step,
    num_columns,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
):
    """The first AHEAD steps of each share."""
    loaded = ()
    for step in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
        if EVEN or (ONCE and step < AHEAD - 1):
            loaded += (_load_step(ptrs, step, mask, column, first_step, end_step, num_columns, False),)
        else:
            loaded += (_load_step(ptrs, step, mask, column, first_step, end_step, num_columns, True),)
    return loaded


@triton.jit
def _multiply(total, weight, x, SHARES: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Add one step of each share to `total`, float32 [SHARES, ROWS, TOKENS]."""
    weight = tl.reshape(weight, [4, 8, SHARES, ROWS // 16, 2, 2, 2, 2])
    weight = tl.reshape(tl.permute(weight, [2, 3, 4, 1, 5, 6, 0, 7]), [SHARES, ROWS, 32])
    x = tl.reshape(x, [4, 8, SHARES, TOKENS // 8, 2, 2, 2])
    x = tl.reshape(tl.permute(x, [2, 4, 5, 0, 6, 3, 1]), [SHARES, 32, TOKENS])
    # "ieee": float32 products are not to be rounded to TF32; other dtypes ignore it.
    return tl.dot(weight, x, total, input_precision="ieee")


@triton.jit
def load_fragments(
    weight_ptr,
    first_row,
    second_row,
    num_rows,
    num_columns,
    stride_weight_row,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr,
    ONCE: tl.constexpr,
):
    """The first BLOCK_K columns of each share of the weight, as `project_fragments` takes them; nothing with SHARES 0.

    To be called before the kernel before this one is waited for: all that DRAM has to bring is under way then.
    """
    loaded = ()
    if SHARES > 0:
        first_step, end_step = _share_bounds(num_columns, SHARES)
        column = _share_columns(first_step)
        ptrs = _weight_ptrs(weight_ptr, first_row, second_row, num_rows, column, stride_weight_row, BLOCK_N)
        loaded = _load_first(ptrs, None, column, first_step, end_step, num_columns, EVEN, BLOCK_K // 32, ONCE)
    return loaded


@triton.jit
def project_fragments(
    loaded,
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
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    ONCE: tl.constexpr,
):
    """As `kernels.ops.projection.project_rows`, of the rows that `tile_row` names: fp32 [BLOCK_M, BLOCK_N].

    Args:
        loaded: what `load_fragments` gave for the same weight.
        EVEN: whether every share has the same number of steps, all of them full, and of BLOCK_K columns a multiple.
        BLOCK_M: 8 or 16; BLOCK_N: a multiple of 16; BLOCK_K: a multiple of 32, columns of a share that are under way at once;
            with ONCE, all there are in a share.
        SHARES: of the columns, the number of warps.
    """
    AHEAD: tl.constexpr = BLOCK_K // 32
    first_step, end_step = _share_bounds(num_columns, SHARES)
    column = _share_columns(first_step)
    # [t, token, share, token tile, 1, 8 columns]
    token = first_token + tl.arange(0, 8)[None, :, None, None, None, None]
    token += tl.arange(0, BLOCK_M // 8)[None, None, None, :, None, None] * 8
    x_mask = token < num_tokens
    x_ptrs = tl.max_contiguous(x_ptr + token.to(tl.int64) * stride_x_token + column, [8, 4, 2, 1, 1, 16])
    xs = _load_first(x_ptrs, x_mask, column, first_step, end_step, num_columns, EVEN, AHEAD, ONCE)
    if BLOCK_PARTS > 0:
        # Asked for before the product and needed after it: nobody waits for them.
        row_token = first_token + tl.arange(0, BLOCK_M)
        part = tl.arange(0, BLOCK_PARTS)
        square_sums = tl.load(
            square_sums_ptr + row_token[:, None] * stride_square_sums_token + part[None, :],
            mask=(row_token < num_tokens)[:, None] & (part < num_parts)[None, :],
            other=0.0,
        )
    total = tl.zeros([SHARES, BLOCK_N, BLOCK_M], dtype=tl.float32)
    if not ONCE:
        weight_ptrs = _weight_ptrs(weight_ptr, first_row, second_row, num_rows, column, stride_weight_row, BLOCK_N)
        steps = ((num_columns + 31) // 32 + SHARES - 1) // SHARES
        for start in range(AHEAD, steps, AHEAD):
            for turn in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
                total = _multiply(total, loaded[0], xs[0], SHARES, BLOCK_N, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
                step = start + turn
                weight = _load_step(weight_ptrs, step, None, column, first_step, end_step, num_columns, not EVEN)
                x = _load_step(x_ptrs, step, x_mask, column, first_step, end_step, num_columns, not EVEN)
                loaded = loaded[1:]
                loaded += (weight,)
                xs = xs[1:]
                xs += (x,)
    for turn in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
        total = _multiply(total, loaded[turn], xs[turn], SHARES, BLOCK_N, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    result = tl.trans(tl.sum(total, axis=0))
    if BLOCK_PARTS > 0:
        result = result / tl.sqrt(tl.sum(square_sums, axis=1) / num_columns + eps)[:, None]
    return result
