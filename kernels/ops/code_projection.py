"""The product of few tokens with a weight of integer codes, on the matrix unit. Not an op: device functions.

Memory bounds it, so what counts is that loads stay under way: each warp reads a share of the inputs by itself, and nothing in
between waits for other warps. A share of few chunks is asked for whole, before the kernel before this one has ended: all that
DRAM has to bring is under way then. In a longer one two chunks are. A tile of words lies in the registers just as the matrix
unit takes the codes that come out of it (m16n8k16, with the weight as left operand): lane 4 g + t holds rows g and g + 8 and,
of every 32 columns, 8 t to 8 t + 7. Shapes below are cut by those names, so that no value changes its thread; the numbers of a
group are loaded so too.

The compiler deals a load's dimensions out to lanes and warps in the order of their contiguity, and ties by its version. So all
loads claim it in falling order: the last dimension, t, g, share. What a lane loads at once is 16 bytes of the last one at
most, which do lie together.

Codes are multiplied with what stands above them, and that, the zero and the minimum are put right once a group: they are the
same for all of its columns, and so a number of the row times the sum of x, which the matrix unit gives for a weight of ones.

Codes of 8 bits take a product for each of their halves so. Where they have nothing but scales, one product is all: numbers of
16 bits hold them exactly with their zero taken off, and take fewer instructions than halves do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.code_loads import chunk_ptrs, load_chunk, load_x, tile_row
from kernels.ops.int_codes import chunk_part, code_bias, ones_magic, pair_halves, signed_part, signed_scaling


@triton.jit
def _multiply(
    total,
    loaded,
    xs,
    magic,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add one chunk of each share, as `load_chunk` and `load_x` give it, to `total`, float32 [SHARES, ROWS, COLUMNS].

    With 8 bits and no origin but for the scale of `signed_scaling`, and where there is one group, for its own.
    """
    low, high, scales, origins = loaded
    WIDTH: tl.constexpr = 128 // PARTS
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        # The eight columns by half, word and half of a pair, in the order that `_left_operand` has them.
        x = xs[part]
        if x.dtype.is_int():  # words
            x = pair_halves(x, DTYPE)
        x = tl.reshape(x, [4, 8, SHARES, COLUMNS // 8, 4 // PARTS, 2, 2, 2])
        x = tl.reshape(tl.permute(x, [2, 4, 6, 0, 5, 7, 3, 1]), [SHARES, WIDTH, COLUMNS])
        # Below, "ieee": float32 is not to be rounded to TF32.
        if BITS == 8 and ORIGIN == "none":
            codes = _left_operand(signed_part(low, high, magic, part, PARTS, DTYPE), PARTS, SHARES, ROWS)
            if GROUP == 0:
                total = tl.dot(codes, x, total, input_precision="ieee")
            else:
                sums = tl.dot(codes, x, input_precision="ieee")
                total += _per_output(scales[part].to(tl.float32), SHARES, ROWS, COLUMNS) * sums
        else:
            codes = _left_operand(chunk_part(low, magic, part, PARTS, DTYPE), PARTS, SHARES, ROWS)
            sums = tl.dot(codes, x, input_precision="ieee")
            if BITS == 8:
                codes = _left_operand(chunk_part(high, magic, part, PARTS, DTYPE), PARTS, SHARES, ROWS)
                sums += 16.0 * tl.dot(codes, x, input_precision="ieee")
            # One tile's work, however many there are: the compiler sees that they are alike.
            x_sum = tl.dot(_ones(low, PARTS, DTYPE, SHARES, ROWS), x, input_precision="ieee")
            # What a code of 0 stands for.
            scale = scales[part].to(tl.float32)
            if ORIGIN == "float":
                origin = origins[part].to(tl.float32) - scale * code_bias(DTYPE, BITS)
            elif ORIGIN == "integer":
                origin = -scale * (origins[part].to(tl.float32) + code_bias(DTYPE, BITS))
            else:
                origin = -scale * (2 ** (BITS - 1) + code_bias(DTYPE, BITS))
            total += _per_output(scale, SHARES, ROWS, COLUMNS) * sums
            total += _per_output(origin, SHARES, ROWS, COLUMNS) * x_sum
    return total


@triton.jit
def _per_output(numbers, SHARES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[t, g, share, tile, r, 1] -> [SHARES, ROWS, COLUMNS]; t does not tell rows apart."""
    wide = numbers[:, :, :, :, :, :, None]  # token tile, two tokens
    wide = tl.broadcast_to(wide, [4, 8, SHARES, ROWS // 16, 2, COLUMNS // 8, 2])
    return tl.reshape(tl.permute(wide, [2, 3, 4, 1, 5, 0, 6]), [SHARES, ROWS, COLUMNS])


@triton.jit
def _left_operand(codes, PARTS: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr):
    """Codes of words as `load_chunk` gives them, from `chunk_part` or `signed_part` -> [SHARES, ROWS, 128 / PARTS].

    Columns are in the order place, word, t, half of the words, half of the pair: 16 of them are a step of the matrix unit, of
    which a lane has two pairs, and those of x lie side by side as they were loaded.
    """
    if PARTS == 1:
        codes = tl.permute(codes, [2, 3, 4, 1, 7, 8, 6, 0, 5, 9])
    elif PARTS == 2:
        codes = tl.permute(codes, [2, 3, 4, 1, 7, 6, 0, 5, 8])
    else:
        codes = tl.permute(codes, [2, 3, 4, 1, 6, 0, 5, 7])
    return tl.reshape(codes, [SHARES, ROWS, 128 // PARTS])


@triton.jit
def _ones(words, PARTS: tl.constexpr, DTYPE: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr):
    """As many ones as a left operand has codes.

    They are made of words, of which nothing is left: a constant would be laid out in another way than the codes.
    """
    ones = chunk_part((words & 15) >> 4, ones_magic(DTYPE), 0, PARTS, DTYPE)
    return _left_operand(ones, PARTS, SHARES, ROWS)


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
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`y[t, n] = sum_k x[t, k] * w[n, k]` in fp32 [BLOCK_M, BLOCK_N] of the rows that `tile_row` names.

    The first chunks are asked for before the kernel before this one has ended; with PDL it is waited for here, and whatever
    else needs it is to be loaded after.

    Args:
        x_ptr: what lies past `num_tokens` or `num_columns` counts as 0.
        words_ptr: int32 [num_rows, num_chunks * 4 * BITS] in chunks of 128 columns; `num_columns` need not fill the last.
        scales_ptr, origins_ptr: [num_rows, num_groups], see ORIGIN of `kernels.ops.int_linear`.
        GROUP: columns of a group, a multiple of 32; 0 where there is only one.
        AHEAD: chunks of a share that are under way at once; with ONCE, all there are in a share.
        EVEN: whether every share has the same number of chunks, a multiple of AHEAD, all of them full.
        BLOCK_M: 1, 8 or 16; BLOCK_N: a multiple of 16; SHARES: of the inputs, the number of warps.
    """
    TILES: tl.constexpr = BLOCK_N // 16
    HALF: tl.constexpr = BLOCK_N // 2
    COLUMNS: tl.constexpr = 8 if BLOCK_M == 1 else BLOCK_M  # pyright: ignore[reportAssignmentType]
    PARTS: tl.constexpr = 1 if GROUP % 128 == 0 else 2 if GROUP % 64 == 0 else 4  # pyright: ignore[reportAssignmentType]
    # Of a long share, chunks of x that are under way. Measured on an H200 with 16 tokens: where there are 8 shares, a second
    # one saves 16 % of the time; where there are 2, with registers full of the weight, it costs 29 %.
    X_AHEAD: tl.constexpr = 2 if SHARES >= 8 else 1  # pyright: ignore[reportAssignmentType]
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
    word_ptrs, scale_ptrs, origin_ptrs = chunk_ptrs(
        words_ptr,
        scales_ptr,
        origins_ptr,
        row,
        stride_words_row,
        stride_scales_row,
        stride_origins_row,
        ORIGIN,
        SHARES,
        TILES,
    )

    # [t, token, share, token tile, place, 8 columns]
    token = first_token + g[None, :, None, None, None, None]
    token += tl.arange(0, COLUMNS // 8)[None, None, None, :, None, None] * 8
    column = tl.arange(0, 4 // PARTS)[None, None, None, None, :, None] * 32
    column += t[:, None, None, None, None, None] * 8 + tl.arange(0, 8)[None, None, None, None, None, :]
    # A single token stands in every column of the matrix unit: no lane has to be left out.
    x_token = first_token + token * 0 if BLOCK_M == 1 else token
    x_ptrs = x_ptr + x_token.to(tl.int64) * stride_x_token + column
    x_mask = x_token < num_tokens

    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # Where there is a single product, what it takes to carry x in single numbers is a tenth of all instructions.
    WORDS: tl.constexpr = BITS == 8 and ORIGIN == "none" and not DTYPE.is_fp32()  # pyright: ignore[reportAssignmentType]
    total = tl.zeros([SHARES, BLOCK_N, COLUMNS], dtype=tl.float32)
    loaded = ()
    for early in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
        chunk = load_chunk(
            word_ptrs,
            scale_ptrs,
            origin_ptrs,
            stride_scales_group,
            stride_origins_group,
            num_columns,
            first_chunk,
            early,
            end_chunk,
            BITS,
            ORIGIN,
            GROUP,
            PARTS,
            EVEN,
            SHARES,
            TILES,
        )
        loaded += (chunk,)
    # Where there is one group, of every chunk; 0 in a share without any.
    row_scales = loaded[0][2][0]  # pyright: ignore[reportGeneralTypeIssues]
    if PDL:
        tl.extra.cuda.gdc_wait()
    if ONCE:
        for turn in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
            xs = load_x(
                x_ptrs, x_mask, column, num_columns, first_chunk, turn, end_chunk, PARTS, EVEN, BLOCK_M == 1, WORDS
            )
            chunk_now = loaded[turn]
            total = _multiply(total, chunk_now, xs, magic, BITS, ORIGIN, GROUP, PARTS, SHARES, BLOCK_N, COLUMNS, DTYPE)
    else:
        xs = ()
        for early in tl.static_range(X_AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
            x = load_x(
                x_ptrs, x_mask, column, num_columns, first_chunk, early, end_chunk, PARTS, EVEN, BLOCK_M == 1, WORDS
            )
            xs += (x,)
        for step in range(0, steps, AHEAD):
            for turn in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
                now = step + turn
                ahead = load_chunk(
                    word_ptrs,
                    scale_ptrs,
                    origin_ptrs,
                    stride_scales_group,
                    stride_origins_group,
                    num_columns,
                    first_chunk,
                    now + AHEAD,
                    end_chunk,
                    BITS,
                    ORIGIN,
                    GROUP,
                    PARTS,
                    EVEN,
                    SHARES,
                    TILES,
                )
                next_x = load_x(
                    x_ptrs,
                    x_mask,
                    column,
                    num_columns,
                    first_chunk,
                    now + X_AHEAD,
                    end_chunk,
                    PARTS,
                    EVEN,
                    BLOCK_M == 1,
                    WORDS,
                )
                chunk_now = loaded[0]  # pyright: ignore[reportGeneralTypeIssues]
                x_now = xs[0]  # pyright: ignore[reportGeneralTypeIssues]
                total = _multiply(
                    total, chunk_now, x_now, magic, BITS, ORIGIN, GROUP, PARTS, SHARES, BLOCK_N, COLUMNS, DTYPE
                )
                loaded = loaded[1:]
                loaded += (ahead,)
                xs = xs[1:]
                xs += (next_x,)
    if BITS == 8 and ORIGIN == "none":
        _, _, left_out = signed_scaling(DTYPE)
        total *= left_out
        if GROUP == 0:
            total *= _per_output(row_scales.to(tl.float32), SHARES, BLOCK_N, COLUMNS)
    sums = tl.sum(total, axis=0)
    if BLOCK_M == 1:
        sums = tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == 0, sums, 0.0), axis=1)[:, None]
    return tl.trans(sums)
