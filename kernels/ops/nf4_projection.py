"""The product of few tokens with a weight in NormalFloat4, on the matrix unit. Not an op: its kernel.

As `kernels.ops.code_projection`: each warp reads a share of the inputs by itself, two chunks ahead of what it multiplies, and a
tile of words lies in the registers just as the matrix unit takes the levels that come out of it. Shapes below are cut by what
lanes hold: lane 4 g + t the rows g and g + 8 and, of every 32 columns, 8 t to 8 t + 7, which are eight neighbours in memory,
but columns 4 t to 4 t + 3 and 16 more of the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.code_loads import load_chunk, load_x, tile_row
from kernels.ops.linear_outputs import store_outputs
from kernels.ops.nf4_levels import level_part, load_tables


@triton.jit
def _per_output(numbers, SHARES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[t, g, share, tile, r] -> [SHARES, ROWS, COLUMNS]; t does not tell rows apart."""
    wide = numbers[:, :, :, :, :, None, None]  # token tile, two tokens
    wide = tl.broadcast_to(wide, [4, 8, SHARES, ROWS // 16, 2, COLUMNS // 8, 2])
    return tl.reshape(tl.permute(wide, [2, 3, 4, 1, 5, 0, 6]), [SHARES, ROWS, COLUMNS])


@triton.jit
def _multiply(
    total,
    loaded,
    xs,
    levels_ptr,
    tables,
    step,
    mean,
    PARTS: tl.constexpr,
    ASM: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add one chunk of each share, as `load_chunk` and `load_x` give it, to `total`, float32 [SHARES, ROWS, COLUMNS]."""
    WIDTH: tl.constexpr = 128 // PARTS
    words, codes = loaded[0], loaded[2]
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        x = tl.reshape(xs[part], [4, 8, SHARES, COLUMNS // 8, 4 // PARTS, 2, 4])
        x = tl.reshape(tl.permute(x, [2, 4, 5, 0, 6, 3, 1]), [SHARES, WIDTH, COLUMNS])
        levels = level_part(words, levels_ptr, tables, part, PARTS, ASM)
        if PARTS == 1:
            levels = tl.permute(levels, [2, 3, 4, 1, 7, 8, 5, 0, 6, 9])
        elif PARTS == 2:
            levels = tl.permute(levels, [2, 3, 4, 1, 7, 5, 0, 6, 8])
        else:
            levels = tl.permute(levels, [2, 3, 4, 1, 5, 0, 6, 7])
        levels = tl.reshape(levels, [SHARES, ROWS, WIDTH])
        # "ieee": float32 is not to be rounded to TF32.
        sums = tl.dot(levels, x, input_precision="ieee")
        code = tl.reshape(codes[part], [4, 8, SHARES, ROWS // 16, 2])
        total += _per_output(code.to(tl.float32) * step + mean, SHARES, ROWS, COLUMNS) * sums
    return total


@triton.jit
def project_nf4(
    x_ptr,
    words_ptr,
    levels_ptr,
    tables_ptr,
    codes_ptr,
    steps_ptr,
    means_ptr,
    first_row,
    second_row,
    num_rows,
    first_token,
    num_tokens,
    num_columns,
    num_chunks,
    stride_x_token,
    stride_words_row,
    stride_codes_row,
    stride_codes_block,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """`y[t, n] = sum_k x[t, k] * level[q[n, k]] * (m[n] + d[n] * c[n, b])` in fp32 [BLOCK_M, BLOCK_N], b the block of k.

    Of the rows that `tile_row` names.

    The first chunks are asked for before the kernel before this one has ended; with PDL it is waited for here, and whatever
    else needs it is to be loaded after.

    Args:
        x_ptr: what lies past `num_tokens` or `num_columns` counts as 0.
        words_ptr: int32 [num_rows, num_chunks * 16], see `to_nf4_chunks`; `num_columns` need not fill the last.
        levels_ptr, tables_ptr: `level_table` and `table_words` of x's dtype.
        codes_ptr, steps_ptr, means_ptr: c, d and m, see `kernels.ops.nf4_linear`.
        BLOCK: columns of a block, a multiple of 32; 0 where there is only one.
        AHEAD, ONCE, EVEN: see `kernels.ops.code_projection.project_codes`.
        BLOCK_M: 1, 8 or 16; BLOCK_N: a multiple of 16; SHARES: of the inputs, the number of warps.
        ASM: see `level_part`.
    """
    TILES: tl.constexpr = BLOCK_N // 16
    COLUMNS: tl.constexpr = 8 if BLOCK_M == 1 else BLOCK_M  # pyright: ignore[reportAssignmentType]
    PARTS: tl.constexpr = 1 if BLOCK % 128 == 0 else 2 if BLOCK % 64 == 0 else 4  # pyright: ignore[reportAssignmentType]
    share = tl.arange(0, SHARES)
    steps = (num_chunks + SHARES - 1) // SHARES
    first_chunk = share * steps
    end_chunk = tl.minimum(first_chunk + steps, num_chunks)

    t = tl.arange(0, 4)
    g = tl.arange(0, 8)
    tile = tl.arange(0, TILES)
    # [t, g, share, tile, r], and a lane's four words.
    index = tile[None, None, None, :, None] * 16 + tl.arange(0, 2)[None, None, None, None, :] * 8
    index += g[None, :, None, None, None]
    row = tile_row(index, first_row, second_row, num_rows, BLOCK_N // 2).to(tl.int64)
    word = t[:, None, None, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, None, None, :]
    word_ptrs = words_ptr + (row * stride_words_row)[:, :, :, :, :, None] + word
    # [t, token, share, token tile, 32 columns, 8]
    token = first_token + g[None, :, None, None, None, None]
    token += tl.arange(0, COLUMNS // 8)[None, None, None, :, None, None] * 8
    column = tl.arange(0, 4 // PARTS)[None, None, None, None, :, None] * 32
    column += t[:, None, None, None, None, None] * 8 + tl.arange(0, 8)[None, None, None, None, None, :]
    # A single token stands in every column of the matrix unit: no lane has to be left out.
    x_token = first_token + token * 0 if BLOCK_M == 1 else token
    x_ptrs = x_ptr + x_token.to(tl.int64) * stride_x_token + column
    x_mask = x_token < num_tokens
    wide_row = tl.broadcast_to(row, [4, 8, SHARES, TILES, 2])
    code_ptrs = (codes_ptr + wide_row * stride_codes_row)[:, :, :, :, :, None]

    lane = t[:, None, None, None, None, None, None] * 8 + g[None, :, None, None, None, None, None]
    tables = load_tables(tables_ptr + lane)
    total = tl.zeros([SHARES, BLOCK_N, COLUMNS], dtype=tl.float32)
    loaded = ()
    for early in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
        chunk = load_chunk(
            word_ptrs,
            code_ptrs,
            code_ptrs,
            stride_codes_block,
            0,
            num_columns,
            first_chunk,
            early,
            end_chunk,
            4,
            "none",
            BLOCK,
            PARTS,
            EVEN,
            SHARES,
            TILES,
        )
        loaded += (chunk,)
    step_of_row = tl.load(steps_ptr + wide_row).to(tl.float32)
    mean_of_row = tl.load(means_ptr + wide_row).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if ONCE:
        for turn in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
            xs = load_x(x_ptrs, x_mask, column, num_columns, first_chunk, turn, end_chunk, PARTS, EVEN, BLOCK_M == 1)
            total = _multiply(
                total,
                loaded[turn],
                xs,
                levels_ptr,
                tables,
                step_of_row,
                mean_of_row,
                PARTS,
                ASM,
                SHARES,
                BLOCK_N,
                COLUMNS,
            )
    else:
        xs = load_x(x_ptrs, x_mask, column, num_columns, first_chunk, 0, end_chunk, PARTS, EVEN, BLOCK_M == 1)
        for step in range(0, steps, AHEAD):
            for turn in tl.static_range(AHEAD):  # pyright: ignore[reportGeneralTypeIssues]
                now = step + turn
                ahead = load_chunk(
                    word_ptrs,
                    code_ptrs,
                    code_ptrs,
                    stride_codes_block,
                    0,
                    num_columns,
                    first_chunk,
                    now + AHEAD,
                    end_chunk,
                    4,
                    "none",
                    BLOCK,
                    PARTS,
                    EVEN,
                    SHARES,
                    TILES,
                )
                next_xs = load_x(
                    x_ptrs, x_mask, column, num_columns, first_chunk, now + 1, end_chunk, PARTS, EVEN, BLOCK_M == 1
                )
                total = _multiply(
                    total,
                    loaded[0],  # pyright: ignore[reportGeneralTypeIssues]
                    xs,
                    levels_ptr,
                    tables,
                    step_of_row,
                    mean_of_row,
                    PARTS,
                    ASM,
                    SHARES,
                    BLOCK_N,
                    COLUMNS,
                )
                loaded = loaded[1:]
                loaded += (ahead,)
                xs = next_xs
    sums = tl.sum(total, axis=0)
    if BLOCK_M == 1:
        sums = tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == 0, sums, 0.0), axis=1)[:, None]
    return tl.trans(sums)


@triton.jit(do_not_specialize=["num_tokens"])
def few_tokens_kernel(
    output_ptr,
    x_ptr,
    words_ptr,
    levels_ptr,
    tables_ptr,
    codes_ptr,
    steps_ptr,
    means_ptr,
    bias_ptr,
    residual_ptr,
    num_tokens,
    num_rows,
    num_columns,
    num_chunks,
    stride_output_token,
    stride_x_token,
    stride_words_row,
    stride_codes_row,
    stride_codes_block,
    stride_residual_token,
    LEVEL_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
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
    total = project_nf4(
        x_ptr,
        words_ptr,
        levels_ptr,
        tables_ptr,
        codes_ptr,
        steps_ptr,
        means_ptr,
        first_row,
        first_row + BLOCK_N // 2,
        num_rows,
        first_token,
        num_tokens,
        num_columns,
        num_chunks,
        stride_x_token,
        stride_words_row,
        stride_codes_row,
        stride_codes_block,
        BLOCK,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        SHARES,
        AHEAD,
        ONCE,
        ASM,
        PDL,
    )
    store_outputs(
        output_ptr,
        total * (1.0 / LEVEL_SCALE),
        bias_ptr,
        residual_ptr,
        first_token + tl.arange(0, BLOCK_M)[:, None],
        first_row + tl.arange(0, BLOCK_N)[None, :],
        num_tokens,
        num_rows,
        stride_output_token,
        stride_residual_token,
        BIAS,
        RESIDUAL,
    )
