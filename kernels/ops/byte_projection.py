"""The product of few tokens with a weight of 8-bit floats or integers, both rounded, on the matrix unit.

Not an op: a kernel that two ops launch.

As in `kernels.ops.code_projection`, each warp reads a share of the inputs by itself, one of few chunks at once, and what a lane
loads is what the matrix unit takes from it: 16 neighbouring bytes of a row, and the same of a token. Which columns of its own
the unit takes them for does not matter then.

8-bit floats are multiplied as float16, which holds each of them; Hopper's unit would do the same with those of few rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.code_loads import tile_row
from kernels.ops.linear_outputs import store_outputs


@triton.jit
def _load(ptrs, mask, MASKED: tl.constexpr):
    if MASKED:
        tile = tl.load(ptrs, mask=mask, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def _bytes(words, BYTE: tl.constexpr, ASM: tl.constexpr):
    """int32 [...] -> its four bytes [..., 2, 2], the lowest first: int8, or float16 of 8-bit floats."""
    if ASM and not BYTE.is_int8():
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        even = tl.join(low, high).to(tl.int16).to(tl.float16, bitcast=True)
        odd = (tl.join(low, high) >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        codes = tl.join(even, odd)
    else:
        even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
        odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
        codes = tl.join(even, odd)
        if not BYTE.is_int8():
            codes = codes.to(BYTE, bitcast=True).to(tl.float16)
    return codes


@triton.jit
def _multiply(
    total,
    words,
    x,
    BYTE: tl.constexpr,
    DTYPE: tl.constexpr,
    SUM: tl.constexpr,
    RUN: tl.constexpr,
    ASM: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add one chunk of each share to `total`, SUM [SHARES, ROWS, COLUMNS].

    Args:
        RUN: neighbouring columns of the product that a lane holds.
    """
    x = tl.reshape(x, [4, 8, SHARES, COLUMNS // 8, 2, 16 // RUN, RUN])
    x = tl.reshape(tl.permute(x, [2, 4, 5, 0, 6, 3, 1]), [SHARES, 128, COLUMNS])
    # [t, g, share, tile, half, part, byte] -> [share, tile, half, g, part, run, t, byte of it]
    codes = tl.reshape(_bytes(words, BYTE, ASM), [4, 8, SHARES, ROWS // 16, 2, 2, 16 // RUN, RUN])
    codes = tl.reshape(tl.permute(codes, [2, 3, 4, 1, 5, 6, 0, 7]), [SHARES, ROWS, 128])
    return tl.dot(codes, x.to(DTYPE), total, out_dtype=SUM)


@triton.jit
def project_bytes(
    x_ptr,
    words_ptr,
    first_row,
    second_row,
    num_rows,
    first_token,
    num_tokens,
    num_columns,
    stride_x_token,
    stride_words_row,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """`y[t, n] = sum_k x[t, k] * w[n, k]` [BLOCK_M, BLOCK_N], in int32 of int8, in fp32 of 8-bit floats.

    Of the rows that `tile_row` names.

    The first chunks are asked for before the kernel before this one has ended; with PDL it is waited for here, and whatever
    else needs it is to be loaded after.

    Args:
        x_ptr: 16 bytes of a token are aligned; what lies past `num_tokens` or `num_columns` counts as 0.
        words_ptr: int32 [num_rows, num_columns / 4], four bytes of x's dtype each. As words, they go round the loop in the
            registers in which the matrix unit takes them; bytes would be taken apart and put together again.
        num_columns: a multiple of 16.
        AHEAD, ONCE, EVEN: see `kernels.ops.code_projection.project_codes`; a chunk is of 128 columns.
        BLOCK_M: 1, 8 or 16; BLOCK_N: a multiple of 16; SHARES: of the inputs, the number of warps.
        ASM: whether 8-bit floats may be converted by PTX.
    """
    TILES: tl.constexpr = BLOCK_N // 16
    COLUMNS: tl.constexpr = 8 if BLOCK_M == 1 else BLOCK_M  # pyright: ignore[reportAssignmentType]
    BYTE: tl.constexpr = x_ptr.dtype.element_ty
    DTYPE: tl.constexpr = BYTE if BYTE.is_int8() else tl.float16  # pyright: ignore[reportAssignmentType]
    SUM: tl.constexpr = tl.int32 if BYTE.is_int8() else tl.float32  # pyright: ignore[reportAssignmentType]
    RUN: tl.constexpr = 8 if BYTE.is_int8() else 4  # pyright: ignore[reportAssignmentType]
    share = tl.arange(0, SHARES)[None, None, :, None, None, None, None]
    num_chunks = (num_columns + 127) // 128
    steps = (num_chunks + SHARES - 1) // SHARES
    first_column = share * steps * 128
    end_column = tl.minimum(first_column + steps * 128, num_columns)

    t = tl.arange(0, 4)[:, None, None, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None, None, None]
    part = tl.arange(0, 2)[None, None, None, None, None, :, None]
    # [t, g, share, tile, half of a tile, part of a chunk, word]
    index = tl.arange(0, TILES)[None, None, None, :, None, None, None] * 16
    index += tl.arange(0, 2)[None, None, None, None, :, None, None] * 8 + g
    row = tile_row(index, first_row, second_row, num_rows, BLOCK_N // 2)
    word = part * 16 + t * 4 + tl.arange(0, 4)[None, None, None, None, None, None, :]
    # Where 16 bytes begin, which are all of a row's or none.
    column = first_column + part * 64 + t * 16
    word_ptrs = words_ptr + row.to(tl.int64) * stride_words_row + (first_column // 4 + word)
    # [t, token, share, token tile, 1, part of a chunk, byte]
    token = first_token + tl.arange(0, COLUMNS // 8)[None, None, None, :, None, None, None] * 8 + g
    # A single token stands in every column of the matrix unit: no lane has to be left out.
    x_token = first_token + token * 0 if BLOCK_M == 1 else token
    byte = tl.arange(0, 16)[None, None, None, None, None, None, :]
    x_ptrs = x_ptr + x_token.to(tl.int64) * stride_x_token + (column + byte)
    x_mask = x_token < num_tokens

    total = tl.zeros([SHARES, BLOCK_N, COLUMNS], dtype=SUM)
    last = steps - 1
    loaded = ()
    for early in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
        words = _load(word_ptrs + tl.minimum(early, last) * 32, column + early * 128 < end_column, not EVEN)
        loaded += (words,)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if ONCE:
        for turn in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
            inside = column + turn * 128 < end_column
            x = _load(x_ptrs + turn * 128, x_mask if EVEN else x_mask & inside, not EVEN or BLOCK_M > 1)
            total = _multiply(total, loaded[turn], x, BYTE, DTYPE, SUM, RUN, ASM, SHARES, BLOCK_N, COLUMNS)
    else:
        for step in range(0, steps, AHEAD):
            for turn in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
                now = step + turn
                inside = column + now * 128 < end_column
                x = _load(x_ptrs + now * 128, x_mask if EVEN else x_mask & inside, not EVEN or BLOCK_M > 1)
                words_now = loaded[0]  # pyright: ignore[reportGeneralTypeIssues]
                total = _multiply(total, words_now, x, BYTE, DTYPE, SUM, RUN, ASM, SHARES, BLOCK_N, COLUMNS)
                inside = column + (now + AHEAD) * 128 < end_column
                words = _load(word_ptrs + tl.minimum(now + AHEAD, last) * 32, inside, not EVEN)
                loaded = loaded[1:]
                loaded += (words,)
    sums = tl.sum(total, axis=0)
    if BLOCK_M == 1:
        sums = tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == 0, sums, 0), axis=1)[:, None]
    return tl.trans(sums)


@triton.jit
def load_scales(scales_ptr, row, num_rows):
    """Of rows: to be asked for before the product, as they come from further away than what belongs to tokens."""
    return tl.load(scales_ptr + row, mask=row < num_rows, other=0.0)


@triton.jit
def store_scaled(
    output_ptr,
    sums,
    x_scales_ptr,
    scales,
    bias_ptr,
    residual_ptr,
    token,
    row,
    num_tokens,
    num_rows,
    stride_output_token,
    stride_residual_token,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """`store_outputs` of sums times the scales of their token and their row."""
    x_scale = tl.load(x_scales_ptr + token, mask=token < num_tokens, other=0.0)
    store_outputs(
        output_ptr,
        sums.to(tl.float32) * x_scale * scales,
        bias_ptr,
        residual_ptr,
        token,
        row,
        num_tokens,
        num_rows,
        stride_output_token,
        stride_residual_token,
        BIAS,
        RESIDUAL,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def few_tokens_kernel(
    output_ptr,
    x_ptr,
    x_scales_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    num_tokens,
    num_rows,
    num_columns,
    stride_output_token,
    stride_x_token,
    stride_words_row,
    stride_residual_token,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens per program. Grid: (cdiv(num_rows, BLOCK_N), cdiv(num_tokens, BLOCK_M))."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_N
    first_token = tl.program_id(1) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_N)[None, :]
    scales = load_scales(scales_ptr, row, num_rows)
    sums = project_bytes(
        x_ptr,
        words_ptr,
        first_row,
        first_row + BLOCK_N // 2,
        num_rows,
        first_token,
        num_tokens,
        num_columns,
        stride_x_token,
        stride_words_row,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        SHARES,
        AHEAD,
        ONCE,
        ASM,
        PDL,
    )
    store_scaled(
        output_ptr,
        sums,
        x_scales_ptr,
        scales,
        bias_ptr,
        residual_ptr,
        first_token + tl.arange(0, BLOCK_M)[:, None],
        row,
        num_tokens,
        num_rows,
        stride_output_token,
        stride_residual_token,
        BIAS,
        RESIDUAL,
    )
