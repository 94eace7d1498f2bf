"""What a product with integer codes loads of the weight and of x, as `kernels.ops.code_projection` lays it out. Not an op."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_row(index, first_row, second_row, num_rows, HALF: tl.constexpr):
    """Weight row of a tile's row: the first HALF from `first_row` on, the others from `second_row` on; none past the end."""
    row = tl.where(index < HALF, first_row + index, second_row + index - HALF)
    return tl.minimum(row, num_rows - 1)


@triton.jit
def chunk_ptrs(
    words_ptr,
    scales_ptr,
    origins_ptr,
    row,
    stride_words_row,
    stride_scales_row,
    stride_origins_row,
    ORIGIN: tl.constexpr,
    SHARES: tl.constexpr,
    TILES: tl.constexpr,
):
    """Of weight rows, int64 [1, g, share or 1, tile, r], what `load_chunk` takes: pointers to words, scales and origins."""
    row = row[:, :, :, :, :, None]
    word = tl.arange(0, 4)[:, None, None, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, None, None, :]
    word_ptrs = words_ptr + row * stride_words_row + word
    scale_ptrs = tl.broadcast_to(scales_ptr + row * stride_scales_row, [4, 8, SHARES, TILES, 2, 1])
    origin_ptrs = scale_ptrs
    if ORIGIN != "none":
        origin_ptrs = tl.broadcast_to(origins_ptr + row * stride_origins_row, [4, 8, SHARES, TILES, 2, 1])
    return word_ptrs, scale_ptrs, origin_ptrs


@triton.jit
def load_chunk(
    word_ptrs,
    scale_ptrs,
    origin_ptrs,
    stride_scales_group,
    stride_origins_group,
    num_columns,
    first_chunk,
    index,
    end_chunk,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    SHARES: tl.constexpr,
    TILES: tl.constexpr,
):
    """Of the weight, each share's chunk number `index`: its words, those of the codes' high halves, scales and origins.

    Words are [t, g, share, tile, r, half of a lane's words, word]; past the share's end they are any.
    """
    chunk = tl.minimum(first_chunk + index, tl.maximum(end_chunk - 1, 0))  # [SHARES]
    valid = first_chunk + index < end_chunk
    chunk_ptrs = tl.max_contiguous(word_ptrs + chunk[None, None, :, None, None, None] * (4 * BITS), [8, 4, 2, 1, 1, 16])
    low = tl.reshape(tl.load(chunk_ptrs), [4, 8, SHARES, TILES, 2, 2, 2])
    high = low
    if BITS == 8:
        chunk_ptrs = tl.max_contiguous(chunk_ptrs + 16, [8, 4, 2, 1, 1, 16])
        high = tl.reshape(tl.load(chunk_ptrs), [4, 8, SHARES, TILES, 2, 2, 2])
    scales = _load_numbers(scale_ptrs, stride_scales_group, num_columns, chunk, valid, GROUP, PARTS, EVEN)
    origins = scales
    if ORIGIN != "none":
        origins = _load_numbers(origin_ptrs, stride_origins_group, num_columns, chunk, valid, GROUP, PARTS, EVEN)
    return low, high, scales, origins


@triton.jit
def _load_numbers(
    number_ptrs,
    stride_group,
    num_columns,
    chunk,
    valid,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Part by part of a chunk: [t, g, share, tile, r, 1]; 0 where there are no columns."""
    parts = ()
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        first = chunk * 128 + part * (128 // PARTS)
        group = (first // GROUP if GROUP > 0 else first * 0)[None, None, :, None, None, None]
        part_ptrs = tl.max_contiguous(number_ptrs + group * stride_group, [8, 4, 2, 1, 1, 16])
        if EVEN:
            numbers = tl.load(part_ptrs)
        else:
            inside = ((first < num_columns) & valid)[None, None, :, None, None, None]
            numbers = tl.load(part_ptrs, mask=inside, other=0)
        parts += (numbers,)
    return parts


@triton.jit
def load_x(
    x_ptrs,
    x_mask,
    column,
    num_columns,
    first_chunk,
    index,
    end_chunk,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    BROADCAST: tl.constexpr,
    WORDS: tl.constexpr = False,
):
    """Of each share's chunk number `index`, part by part: [t, token, share, token tile, place, 8 columns].

    With WORDS, pairs of 16 bits are int32, [.., 4]: as such they go round a loop in the registers in which they are loaded and
    multiplied, and not one by one.
    """
    chunk = first_chunk + index
    parts = ()
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        if EVEN:
            chunk = tl.minimum(chunk, end_chunk - 1)
        offset = (chunk * 128 + part * (128 // PARTS))[None, None, :, None, None, None]
        part_ptrs = tl.max_contiguous(x_ptrs + offset, [8, 4, 2, 1, 1, 16])
        if EVEN and BROADCAST:
            x = tl.load(part_ptrs)
        elif EVEN:
            x = tl.load(part_ptrs, mask=x_mask, other=0.0)
        else:
            x_inside = (offset + column < num_columns) & (chunk < end_chunk)[None, None, :, None, None, None]
            x = tl.load(part_ptrs, mask=x_mask & x_inside, other=0.0)
        parts += (_as_words(x) if WORDS else x,)
    return parts


@triton.jit
def _as_words(x):
    """[t, token, share, token tile, place, 8] of 16 bits -> int32 [.., 4]."""
    pairs = tl.reshape(x.to(tl.int16, bitcast=True), [4, 8, x.shape[2], x.shape[3], x.shape[4], 4, 2])
    left, right = tl.split(pairs)
    return (left.to(tl.int32) & 0xFFFF) | (right.to(tl.int32) << 16)
