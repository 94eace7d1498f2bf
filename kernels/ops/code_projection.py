"""The product of few tokens with a weight of integer codes, on the matrix unit. Not an op: device functions.

Memory bounds it, so what counts is that loads stay under way: each warp reads a share of the inputs by itself, two chunks
ahead of what it multiplies, and nothing in the loop waits for other warps. A tile of words lies in the registers just as the
matrix unit takes the codes that come out of it (m16n8k16, with the weight as left operand): lane 4 g + t holds rows g and
g + 8 and, of every 16 columns, 4 t to 4 t + 3. Shapes below are cut by those names, so that no value changes its thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.int_codes import chunk_part


@triton.jit
def tile_row(index, first_row, second_row, num_rows, HALF: tl.constexpr):
    """Weight row of a tile's row: the first HALF from `first_row` on, the others from `second_row` on; none past the end."""
    row = tl.where(index < HALF, first_row + index, second_row + index - HALF)
    return tl.minimum(row, num_rows - 1)


@triton.jit
def _load_words(word_ptrs, chunk, valid, EVEN: tl.constexpr, CHUNK_WORDS: tl.constexpr):
    if EVEN:
        words = tl.load(word_ptrs + chunk * CHUNK_WORDS)
    else:
        words = tl.load(word_ptrs + chunk * CHUNK_WORDS, mask=valid, other=0)
    return words


@triton.jit
def _multiply(
    total,
    low,
    high,
    x_ptrs,
    x_mask,
    column,
    num_columns,
    chunk,
    valid,
    scale_ptrs,
    origin_ptrs,
    word_origin_ptrs,
    magic,
    stride_scales_group,
    stride_origins_group,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    BROADCAST: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add one chunk of each share to `total`, float32 [SHARES, ROWS, COLUMNS]."""
    DTYPE: tl.constexpr = x_ptrs.dtype.element_ty
    BIAS: tl.constexpr = 1024.0 if DTYPE == tl.float16 else 128.0  # pyright: ignore[reportAssignmentType]
    WIDTH: tl.constexpr = 128 // PARTS
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        first = chunk * 128 + part * WIDTH  # column, [SHARES]
        inside = (first < num_columns) & valid
        offset = first[None, None, :, None, None, None]
        if EVEN and BROADCAST:
            x = tl.load(x_ptrs + offset)
        elif EVEN:
            x = tl.load(x_ptrs + offset, mask=x_mask, other=0.0)
        else:
            x_inside = (offset + column < num_columns) & valid[None, None, :, None, None, None]
            x = tl.load(x_ptrs + offset, mask=x_mask & x_inside, other=0.0)
        x = tl.reshape(tl.permute(x, [2, 4, 0, 5, 3, 1]), [SHARES, WIDTH, COLUMNS])
        group = first // GROUP if GROUP > 0 else first * 0
        if EVEN:
            scale = tl.load(scale_ptrs + (group * stride_scales_group)[:, None])
        else:
            scale = tl.load(scale_ptrs + (group * stride_scales_group)[:, None], mask=inside[:, None], other=0.0)
        if ORIGIN == "none":
            zero_low = tl.full([1, 1, 1, 1, 1, 1, 1], BIAS + (8.0 if BITS == 4 else 0.0), DTYPE)
            zero_high = tl.full([1, 1, 1, 1, 1, 1, 1], BIAS + 8.0, DTYPE)
        elif ORIGIN == "integer":
            zero_ptrs = word_origin_ptrs + (group * stride_origins_group)[None, None, :, None, None, None, None]
            if EVEN:
                zero = tl.load(zero_ptrs)
            else:
                zero = tl.load(zero_ptrs, mask=inside[None, None, :, None, None, None, None], other=0)
            zero_low = ((zero & 15).to(tl.float32) + BIAS).to(DTYPE)
            zero_high = ((zero >> 4).to(tl.float32) + BIAS).to(DTYPE)
        else:
            zero_low = tl.full([1, 1, 1, 1, 1, 1, 1], BIAS, DTYPE)
            zero_high = zero_low
        sums = tl.dot(
            _codes(low, zero_low, magic, part, PARTS, DTYPE, SHARES, ROWS), x, input_precision="ieee"
        )  # "ieee": float32 is not to be rounded to TF32
        if BITS == 8:
            codes = _codes(high, zero_high, magic, part, PARTS, DTYPE, SHARES, ROWS)
            sums += 16.0 * tl.dot(codes, x, input_precision="ieee")
        total += scale.to(tl.float32)[:, :, None] * sums
        if ORIGIN == "float":
            if EVEN:
                minimum = tl.load(origin_ptrs + (group * stride_origins_group)[:, None])
            else:
                minimum = tl.load(
                    origin_ptrs + (group * stride_origins_group)[:, None], mask=inside[:, None], other=0.0
                )
            total += minimum.to(tl.float32)[:, :, None] * tl.sum(x.to(tl.float32), axis=1)[:, None, :]
    return total


@triton.jit
def _codes(
    words,
    zero,
    magic,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Words and their zeros [t, g, share, tile, r, q, b] -> codes without their zero, DTYPE [SHARES, ROWS, 128 / PARTS]."""
    codes = chunk_part(words, magic, PART, PARTS, DTYPE)
    if PARTS == 1:
        codes -= zero[:, :, :, :, :, :, :, None, None, None]
        codes = tl.permute(codes, [2, 3, 4, 1, 7, 8, 5, 0, 6, 9])
    elif PARTS == 2:
        codes -= zero[:, :, :, :, :, :, :, None, None]
        codes = tl.permute(codes, [2, 3, 4, 1, 7, 5, 0, 6, 8])
    else:
        codes -= zero[:, :, :, :, :, :, :, None]
        codes = tl.permute(codes, [2, 3, 4, 1, 5, 0, 6, 7])
    return tl.reshape(codes, [SHARES, ROWS, 128 // PARTS])


@triton.jit
def project_codes(
    x_ptr,
    words_ptr,
    scales_ptr,
    origins_ptr,
    magic,
    first_row,
    second_row,
    num_rows,
    first_token,
    num_tokens,
    num_columns,
    num_chunks,
    stride_x_token,
    stride_words_row,
    stride_scales_row,
    stride_scales_group,
    stride_origins_row,
    stride_origins_group,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`y[t, n] = sum_k x[t, k] * w[n, k]` in fp32 [BLOCK_M, BLOCK_N] of the rows that `tile_row` names.

    The first words are asked for before the kernel before this one has ended; with PDL it is waited for here, and whatever
    else needs it is to be loaded after.

    Args:
        x_ptr: what lies past `num_tokens` or `num_columns` counts as 0.
        words_ptr: int32 [num_rows, num_chunks * 4 * BITS] in chunks of 128 columns; `num_columns` need not fill the last.
        scales_ptr, origins_ptr: [num_rows, num_groups], see ORIGIN of `kernels.ops.int_linear`.
        GROUP: columns of a group, a multiple of 32; 0 where there is only one.
        EVEN: whether every share has the same even number of chunks, all of them full.
        BLOCK_M: 1, 8 or 16; BLOCK_N: a multiple of 16; SHARES: of the inputs, the number of warps.
    """
    TILES: tl.constexpr = BLOCK_N // 16
    HALF: tl.constexpr = BLOCK_N // 2
    COLUMNS: tl.constexpr = 8 if BLOCK_M == 1 else BLOCK_M  # pyright: ignore[reportAssignmentType]
    PARTS: tl.constexpr = 1 if GROUP % 128 == 0 else 2 if GROUP % 64 == 0 else 4  # pyright: ignore[reportAssignmentType]
    CHUNK_WORDS: tl.constexpr = 4 * BITS
    share = tl.arange(0, SHARES)
    steps = (num_chunks + SHARES - 1) // SHARES
    first_chunk = share * steps
    end_chunk = tl.minimum(first_chunk + steps, num_chunks)

    t = tl.arange(0, 4)
    g = tl.arange(0, 8)
    tile = tl.arange(0, TILES)
    two = tl.arange(0, 2)
    # [t, g, share, tile, r, q, b]
    index = (
        tile[None, None, None, :, None, None, None] * 16
        + two[None, None, None, None, :, None, None] * 8
        + g[None, :, None, None, None, None, None]
    )
    word = (
        two[None, None, None, None, None, :, None] * 8
        + t[:, None, None, None, None, None, None] * 2
        + two[None, None, None, None, None, None, :]
    )
    row = tile_row(index, first_row, second_row, num_rows, HALF).to(tl.int64)
    word_ptrs = words_ptr + row * stride_words_row + word
    chunk_of = first_chunk[None, None, :, None, None, None, None]
    end_of = end_chunk[None, None, :, None, None, None, None]

    # [t, token, share, token tile, 16 columns, 4]
    token = first_token + g[None, :, None, None, None, None]
    token += tl.arange(0, COLUMNS // 8)[None, None, None, :, None, None] * 8
    column = tl.arange(0, 8 // PARTS)[None, None, None, None, :, None] * 16
    column += t[:, None, None, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, None, None, :]
    # A single token stands in every column of the matrix unit: no lane has to be left out.
    x_token = first_token + token * 0 if BLOCK_M == 1 else token
    x_ptrs = x_ptr + x_token.to(tl.int64) * stride_x_token + column
    x_mask = x_token < num_tokens
    tile_rows = tile_row(tl.arange(0, BLOCK_N), first_row, second_row, num_rows, HALF)[None, :].to(tl.int64)
    scale_ptrs = scales_ptr + tile_rows * stride_scales_row
    origin_ptrs = scale_ptrs if ORIGIN == "none" else origins_ptr + tile_rows * stride_origins_row
    word_origin_ptrs = word_ptrs if ORIGIN == "none" else origins_ptr + row * stride_origins_row

    total = tl.zeros([SHARES, BLOCK_N, COLUMNS], dtype=tl.float32)
    last = steps - 1
    second = tl.minimum(1, last)
    valid_0 = chunk_of < end_of
    valid_1 = chunk_of + 1 < end_of
    low_0 = _load_words(word_ptrs, chunk_of, valid_0, EVEN, CHUNK_WORDS)
    low_1 = _load_words(word_ptrs, chunk_of + second, valid_1, EVEN, CHUNK_WORDS)
    high_0, high_1 = low_0, low_1
    if BITS == 8:
        high_0 = _load_words(word_ptrs + 16, chunk_of, valid_0, EVEN, CHUNK_WORDS)
        high_1 = _load_words(word_ptrs + 16, chunk_of + second, valid_1, EVEN, CHUNK_WORDS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in range(0, steps, 2):
        for turn in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
            chunk = first_chunk + step + turn
            total = _multiply(
                total,
                low_0 if turn == 0 else low_1,
                high_0 if turn == 0 else high_1,
                x_ptrs,
                x_mask,
                column,
                num_columns,
                chunk,
                chunk < end_chunk,
                scale_ptrs,
                origin_ptrs,
                word_origin_ptrs,
                magic,
                stride_scales_group,
                stride_origins_group,
                BITS,
                ORIGIN,
                GROUP,
                PARTS,
                EVEN,
                BLOCK_M == 1,
                SHARES,
                BLOCK_N,
                COLUMNS,
            )
            ahead = step + turn + 2
            valid = chunk_of + ahead < end_of
            ahead = tl.minimum(ahead, last)
            low = _load_words(word_ptrs, chunk_of + ahead, valid, EVEN, CHUNK_WORDS)
            high = low
            if BITS == 8:
                high = _load_words(word_ptrs + 16, chunk_of + ahead, valid, EVEN, CHUNK_WORDS)
            if turn == 0:
                low_0, high_0 = low, high
            else:
                low_1, high_1 = low, high
    sums = tl.sum(total, axis=0)
    if BLOCK_M == 1:
        sums = tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == 0, sums, 0.0), axis=1)[:, None]
    return tl.trans(sums)
