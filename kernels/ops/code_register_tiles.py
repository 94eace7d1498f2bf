"""The product of some tokens with a weight of integer codes that never leave the registers. Not an op: device functions.

Words lie in the registers as in `kernels.ops.code_projection`, here those of 16 rows of every tile of 16 per warp, just as the
matrix unit (m16n8k16, and Hopper's m64nNk16) takes a left operand from there. Only x goes through shared memory, with its
columns in the order in which a lane's words have them. Measured on an H200, 32 tokens take 30 to 40 % less time so. The sums
of 64 fill the registers; there, codes that go through shared memory as well are as fast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.code_loads import chunk_ptrs, load_chunk
from kernels.ops.int_codes import chunk_part, code_bias


@triton.jit
def zero_halves(zero, DTYPE: tl.constexpr):
    """What the low and the high half of a code that stands for 0 are as numbers of DTYPE, `chunk_part`'s bias included."""
    bias = code_bias(DTYPE, 4)
    return ((zero & 15).to(tl.float32) + bias).to(DTYPE), ((zero >> 4).to(tl.float32) + bias).to(DTYPE)


@triton.jit
def _load_x(x_ptrs, x_mask, column, num_columns, chunk, PARTS: tl.constexpr, EVEN_K: tl.constexpr):
    """Part by part of a chunk: [tokens, 128 / PARTS]."""
    parts = ()
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        first = chunk * 128 + part * (128 // PARTS)
        if EVEN_K:
            x = tl.load(x_ptrs + first, mask=x_mask, other=0.0)
        else:
            x = tl.load(x_ptrs + first, mask=x_mask & (first + column < num_columns)[None, :], other=0.0)
        parts += (x,)
    return parts


@triton.jit
def _codes(words, zero, magic, PART: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr):
    """Words as `load_chunk` gives them -> codes without their zero, DTYPE [ROWS, 128 / PARTS].

    Columns are in the order place, word, half of the words, t, half of the pair: 16 of them are a step of the matrix unit.
    """
    codes = chunk_part(words, magic, PART, PARTS, DTYPE)
    if PARTS == 1:
        codes = tl.permute(codes - zero[:, :, :, :, :, :, None, None, None, None], [3, 2, 4, 1, 7, 8, 6, 5, 0, 9])
    elif PARTS == 2:
        codes = tl.permute(codes - zero[:, :, :, :, :, :, None, None, None], [3, 2, 4, 1, 7, 6, 5, 0, 8])
    else:
        codes = tl.permute(codes - zero[:, :, :, :, :, :, None, None], [3, 2, 4, 1, 6, 5, 0, 7])
    return tl.reshape(codes, [ROWS, 128 // PARTS])


@triton.jit
def _per_output(numbers, WARPS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """[t, g, warp, tile, r, 1] -> float32 [ROWS, TOKENS]; t does not tell rows apart, but a lane's pairs of tokens."""
    wide = numbers.to(tl.float32)[:, :, :, :, :, :, None]  # eight tokens, two
    wide = tl.broadcast_to(wide, [4, 8, WARPS, ROWS // (16 * WARPS), 2, TOKENS // 8, 2])
    return tl.reshape(tl.permute(wide, [3, 2, 4, 1, 5, 0, 6]), [ROWS, TOKENS])


@triton.jit
def _multiply(
    total,
    loaded,
    xs,
    magic,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add one chunk, as `load_chunk` and `_load_x` give it, to `total`, float32 [ROWS, TOKENS]."""
    low, high, scales, origins = loaded
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        # Columns by place, t, half of the words, word and half of the pair, in the order that `_codes` has them.
        x = tl.reshape(xs[part], [TOKENS, 4 // PARTS, 4, 2, 2, 2])
        x = tl.reshape(tl.permute(x, [1, 4, 3, 2, 5, 0]), [128 // PARTS, TOKENS])
        if ORIGIN == "integer":
            zero = origins[part].to(tl.int32)
        else:
            zero = tl.full([1, 1, 1, 1, 1, 1], 2 ** (BITS - 1) if ORIGIN == "none" else 0, tl.int32)
        zero_low, zero_high = zero_halves(zero, DTYPE)
        # "ieee": float32 is not to be rounded to TF32.
        sums = tl.dot(_codes(low, zero_low, magic, part, PARTS, DTYPE, ROWS), x, input_precision="ieee")
        if BITS == 8:
            codes = _codes(high, zero_high, magic, part, PARTS, DTYPE, ROWS)
            sums += 16.0 * tl.dot(codes, x, input_precision="ieee")
        total += _per_output(scales[part], WARPS, ROWS, TOKENS) * sums
        if ORIGIN == "float":
            x_sum = tl.sum(xs[part].to(tl.float32), axis=1)
            total += _per_output(origins[part], WARPS, ROWS, TOKENS) * x_sum[None, :]
    return total


@triton.jit
def project_in_registers(
    x_ptr,
    words_ptr,
    scales_ptr,
    origins_ptr,
    magic,
    first_row,
    num_rows,
    token,
    num_tokens,
    num_columns,
    begin,
    end,
    stride_x_token,
    stride_words_row,
    stride_scales_row,
    stride_scales_group,
    stride_origins_row,
    stride_origins_group,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`y[n, t] = sum_k w[n, k] * x[t, k]` over chunks `begin` to `end`, fp32 [BLOCK_N, BLOCK_M].

    Two chunks of the weight are under way, and one of x. The first are asked for before the kernel before this one has ended;
    with PDL it is waited for here.

    Args:
        token: [BLOCK_M]; what lies past `num_tokens` or `num_columns` counts as 0.
        BLOCK_M: 32; BLOCK_N: a multiple of 16 * WARPS.
        The others: see `kernels.ops.code_projection.project_codes`; EVEN_K, whether every chunk is full.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = 1 if GROUP % 128 == 0 else 2 if GROUP % 64 == 0 else 4  # pyright: ignore[reportAssignmentType]
    TILES: tl.constexpr = BLOCK_N // (16 * WARPS)
    AHEAD: tl.constexpr = 2  # pyright: ignore[reportAssignmentType]
    warp = tl.arange(0, WARPS)
    index = tl.arange(0, TILES)[None, None, None, :, None] * (16 * WARPS) + warp[None, None, :, None, None] * 16
    index += tl.arange(0, 2)[None, None, None, None, :] * 8 + tl.arange(0, 8)[None, :, None, None, None]
    row = tl.minimum(first_row + index, num_rows - 1).to(tl.int64)
    word_ptrs, scale_ptrs, origin_ptrs = chunk_ptrs(
        words_ptr,
        scales_ptr,
        origins_ptr,
        row,
        stride_words_row,
        stride_scales_row,
        stride_origins_row,
        ORIGIN,
        WARPS,
        TILES,
    )
    column = tl.arange(0, 128 // PARTS)
    x_ptrs = x_ptr + token[:, None].to(tl.int64) * stride_x_token + column[None, :]
    x_mask = (token < num_tokens)[:, None]
    # To `load_chunk` a warp is a share; here all of them have the same inputs.
    first_chunk = warp * 0 + begin
    end_chunk = warp * 0 + end
    last = tl.maximum(end - 1, 0)

    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
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
            EVEN_K,
            WARPS,
            TILES,
        )
        loaded += (chunk,)
    if PDL:
        tl.extra.cuda.gdc_wait()
    xs = _load_x(x_ptrs, x_mask, column, num_columns, tl.minimum(begin, last), PARTS, EVEN_K)
    for step in range(begin, end):
        ahead = load_chunk(
            word_ptrs,
            scale_ptrs,
            origin_ptrs,
            stride_scales_group,
            stride_origins_group,
            num_columns,
            first_chunk,
            step - begin + AHEAD,
            end_chunk,
            BITS,
            ORIGIN,
            GROUP,
            PARTS,
            EVEN_K,
            WARPS,
            TILES,
        )
        next_xs = _load_x(x_ptrs, x_mask, column, num_columns, tl.minimum(step + 1, last), PARTS, EVEN_K)
        now = loaded[0]  # pyright: ignore[reportGeneralTypeIssues]
        total = _multiply(total, now, xs, magic, BITS, ORIGIN, PARTS, WARPS, BLOCK_N, BLOCK_M, DTYPE)
        loaded = loaded[1:]
        loaded += (ahead,)
        xs = next_xs
    return total
