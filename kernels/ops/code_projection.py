"""The product of few tokens with a weight of integer codes, on the matrix unit. Not an op: device functions.

Memory bounds it, so what counts is that loads stay under way: each warp reads a share of the inputs by itself, two chunks
ahead of what it multiplies, and nothing in the loop waits for other warps. A tile of words lies in the registers just as the
matrix unit takes the codes that come out of it (m16n8k16, with the weight as left operand): lane 4 g + t holds rows g and
g + 8 and, of every 32 columns, 8 t to 8 t + 7. Shapes below are cut by those names, so that no value changes its thread; the
numbers of a group are loaded so too.

The compiler deals a load's dimensions out to lanes and warps in the order of their contiguity, and ties by its version. So all
loads claim it in falling order: the last dimension, t, g, share. What a lane loads at once is 16 bytes of the last one at
most, which do lie together.

Codes are multiplied with what stands above them, and that, the zero and the minimum are put right once a group: they are the
same for all of its columns, and so a number of the row times the sum of x, which the matrix unit gives for a weight of ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.int_codes import chunk_part, code_bias, ones_magic


@triton.jit
def tile_row(index, first_row, second_row, num_rows, HALF: tl.constexpr):
    """Weight row of a tile's row: the first HALF from `first_row` on, the others from `second_row` on; none past the end."""
    row = tl.where(index < HALF, first_row + index, second_row + index - HALF)
    return tl.minimum(row, num_rows - 1)


@triton.jit
def _load_words(
    word_ptrs, chunk, valid, EVEN: tl.constexpr, CHUNK_WORDS: tl.constexpr, SHARES: tl.constexpr, TILES: tl.constexpr
):
    """[t, g, share, tile, r, half of a lane's words, word]."""
    word_ptrs = tl.max_contiguous(word_ptrs + chunk * CHUNK_WORDS, [8, 4, 2, 1, 1, 16])
    if EVEN:
        words = tl.load(word_ptrs)
    else:
        words = tl.load(word_ptrs, mask=valid, other=0)
    return tl.reshape(words, [4, 8, SHARES, TILES, 2, 2, 2])


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
    WIDTH: tl.constexpr = 128 // PARTS
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        first = chunk * 128 + part * WIDTH  # column, [SHARES]
        inside = ((first < num_columns) & valid)[None, None, :, None, None, None]
        offset = first[None, None, :, None, None, None]
        part_ptrs = tl.max_contiguous(x_ptrs + offset, [8, 4, 2, 1, 1, 16])
        if EVEN and BROADCAST:
            x = tl.load(part_ptrs)
        elif EVEN:
            x = tl.load(part_ptrs, mask=x_mask, other=0.0)
        else:
            x_inside = (offset + column < num_columns) & valid[None, None, :, None, None, None]
            x = tl.load(part_ptrs, mask=x_mask & x_inside, other=0.0)
        # The eight columns by half, word and half of a pair, in the order that `_codes` has them.
        x = tl.reshape(x, [4, 8, SHARES, COLUMNS // 8, 4 // PARTS, 2, 2, 2])
        x = tl.reshape(tl.permute(x, [2, 4, 6, 0, 5, 7, 3, 1]), [SHARES, WIDTH, COLUMNS])
        # "ieee": float32 is not to be rounded to TF32.
        sums = tl.dot(_codes(low, magic, part, PARTS, DTYPE, SHARES, ROWS), x, input_precision="ieee")
        if BITS == 8:
            codes = _codes(high, magic, part, PARTS, DTYPE, SHARES, ROWS)
            sums += 16.0 * tl.dot(codes, x, input_precision="ieee")
        # One tile's work, however many there are: the compiler sees that they are alike.
        x_sum = tl.dot(_ones(low, PARTS, DTYPE, SHARES, ROWS), x, input_precision="ieee")
        group = (first // GROUP if GROUP > 0 else first * 0)[None, None, :, None, None, None]
        scale = _load_numbers(scale_ptrs, group * stride_scales_group, inside, EVEN)
        # What a code of 0 stands for.
        if ORIGIN == "float":
            origin = _load_numbers(origin_ptrs, group * stride_origins_group, inside, EVEN)
            origin -= scale * code_bias(DTYPE, BITS)
        elif ORIGIN == "integer":
            zero = _load_numbers(origin_ptrs, group * stride_origins_group, inside, EVEN)
            origin = -scale * (zero + code_bias(DTYPE, BITS))
        else:
            origin = -scale * (2 ** (BITS - 1) + code_bias(DTYPE, BITS))
        total += _per_output(scale, SHARES, ROWS, COLUMNS) * sums
        total += _per_output(origin, SHARES, ROWS, COLUMNS) * x_sum
    return total


@triton.jit
def _load_numbers(number_ptrs, offset, inside, EVEN: tl.constexpr):
    """float32 [t, g, share, tile, r, 1]."""
    number_ptrs = tl.max_contiguous(number_ptrs + offset, [8, 4, 2, 1, 1, 16])
    if EVEN:
        numbers = tl.load(number_ptrs)
    else:
        numbers = tl.load(number_ptrs, mask=inside, other=0)
    return numbers.to(tl.float32)


@triton.jit
def _per_output(numbers, SHARES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[t, g, share, tile, r, 1] -> [SHARES, ROWS, COLUMNS]; t does not tell rows apart."""
    wide = numbers[:, :, :, :, :, :, None]  # token tile, two tokens
    wide = tl.broadcast_to(wide, [4, 8, SHARES, ROWS // 16, 2, COLUMNS // 8, 2])
    return tl.reshape(tl.permute(wide, [2, 3, 4, 1, 5, 0, 6]), [SHARES, ROWS, COLUMNS])


@triton.jit
def _codes(
    words,
    magic,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Words as `_load_words` gives them -> codes with what stands above them, DTYPE [SHARES, ROWS, 128 / PARTS].

    Columns are in the order place, word, t, half of the words, half of the pair: 16 of them are a step of the matrix unit, of
    which a lane has two pairs, and those of x lie side by side as they were loaded.
    """
    codes = chunk_part(words, magic, PART, PARTS, DTYPE)
    if PARTS == 1:
        codes = tl.permute(codes, [2, 3, 4, 1, 7, 8, 6, 0, 5, 9])
    elif PARTS == 2:
        codes = tl.permute(codes, [2, 3, 4, 1, 7, 6, 0, 5, 8])
    else:
        codes = tl.permute(codes, [2, 3, 4, 1, 6, 0, 5, 7])
    return tl.reshape(codes, [SHARES, ROWS, 128 // PARTS])


@triton.jit
def _ones(words, PARTS: tl.constexpr, DTYPE: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr):
    """As many ones as `_codes` has codes.

    They are made of words, of which nothing is left: a constant would be laid out in another way than the codes.
    """
    return _codes((words & 15) >> 4, ones_magic(DTYPE), 0, PARTS, DTYPE, SHARES, ROWS)


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
    index = tile[None, None, None, :, None] * 16 + two[None, None, None, None, :] * 8 + g[None, :, None, None, None]
    # [t, g, share, tile, r]
    row = tile_row(index, first_row, second_row, num_rows, HALF).to(tl.int64)
    word = t[:, None, None, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, None, None, :]
    word_ptrs = words_ptr + (row * stride_words_row)[:, :, :, :, :, None] + word
    chunk_of = first_chunk[None, None, :, None, None, None]
    end_of = end_chunk[None, None, :, None, None, None]

    # [t, token, share, token tile, place, 8 columns]
    token = first_token + g[None, :, None, None, None, None]
    token += tl.arange(0, COLUMNS // 8)[None, None, None, :, None, None] * 8
    column = tl.arange(0, 4 // PARTS)[None, None, None, None, :, None] * 32
    column += t[:, None, None, None, None, None] * 8 + tl.arange(0, 8)[None, None, None, None, None, :]
    # A single token stands in every column of the matrix unit: no lane has to be left out.
    x_token = first_token + token * 0 if BLOCK_M == 1 else token
    x_ptrs = x_ptr + x_token.to(tl.int64) * stride_x_token + column
    x_mask = x_token < num_tokens
    number_row = row[:, :, :, :, :, None]
    scale_ptrs = tl.broadcast_to(scales_ptr + number_row * stride_scales_row, [4, 8, SHARES, TILES, 2, 1])
    origin_ptrs = scale_ptrs
    if ORIGIN != "none":
        origin_ptrs = tl.broadcast_to(origins_ptr + number_row * stride_origins_row, [4, 8, SHARES, TILES, 2, 1])

    total = tl.zeros([SHARES, BLOCK_N, COLUMNS], dtype=tl.float32)
    last = steps - 1
    second = tl.minimum(1, last)
    valid_0 = chunk_of < end_of
    valid_1 = chunk_of + 1 < end_of
    low_0 = _load_words(word_ptrs, chunk_of, valid_0, EVEN, CHUNK_WORDS, SHARES, TILES)
    low_1 = _load_words(word_ptrs, chunk_of + second, valid_1, EVEN, CHUNK_WORDS, SHARES, TILES)
    high_0, high_1 = low_0, low_1
    if BITS == 8:
        high_0 = _load_words(word_ptrs + 16, chunk_of, valid_0, EVEN, CHUNK_WORDS, SHARES, TILES)
        high_1 = _load_words(word_ptrs + 16, chunk_of + second, valid_1, EVEN, CHUNK_WORDS, SHARES, TILES)
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
            low = _load_words(word_ptrs, chunk_of + ahead, valid, EVEN, CHUNK_WORDS, SHARES, TILES)
            high = low
            if BITS == 8:
                high = _load_words(word_ptrs + 16, chunk_of + ahead, valid, EVEN, CHUNK_WORDS, SHARES, TILES)
            if turn == 0:
                low_0, high_0 = low, high
            else:
                low_1, high_1 = low, high
    sums = tl.sum(total, axis=0)
    if BLOCK_M == 1:
        sums = tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == 0, sums, 0.0), axis=1)[:, None]
    return tl.trans(sums)
