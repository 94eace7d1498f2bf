"""A linear layer over integer codes of 4 or 8 bits with a scale per group of inputs, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.checks import check_float_dtype, check_tensor
from kernels.ops.int_codes import load_grid, units
from kernels.ops.projection import Tiles
from kernels.reference.int_words import CHUNK

BITS = (4, 8)


@triton.jit(do_not_specialize=["num_tokens"])
def _int_linear_kernel(
    output_ptr,
    x_ptr,
    words_ptr,
    scales_ptr,
    origins_ptr,
    bias_ptr,
    num_tokens,
    num_rows,
    num_chunks,
    group_chunks,
    stride_output_token,
    stride_x_token,
    stride_words_row,
    stride_scales_row,
    stride_origins_row,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens per program. Grid: (cdiv(num_rows, BLOCK_N), cdiv(num_tokens, BLOCK_M))."""
    WORDS: tl.constexpr = BITS  # of a chunk of 32 codes
    PLACES: tl.constexpr = 32 // BITS  # codes of a word, which are WORDS columns apart
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(row, num_rows - 1)  # rows past the end are not stored
    first_token = tl.program_id(1) * BLOCK_M
    token = first_token + tl.arange(0, BLOCK_M)
    block_chunk = tl.arange(0, BLOCK_CHUNKS)
    word = tl.arange(0, WORDS)
    words_ptrs = words_ptr + weight_row[:, None, None].to(tl.int64) * stride_words_row + word[None, None, :]
    if BLOCK_M == 1:
        wide = tl.zeros([BLOCK_N, BLOCK_CHUNKS, WORDS], dtype=tl.float32)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, num_chunks, BLOCK_CHUNKS):
        chunk = start + block_chunk
        chunk_mask = chunk < num_chunks
        words_chunk = words_ptrs + chunk[None, :, None] * WORDS
        if EVEN_K:
            words = tl.load(words_chunk)
        else:
            words = tl.load(words_chunk, mask=chunk_mask[None, :, None], other=0)
        step, origin = load_grid(
            scales_ptr,
            origins_ptr,
            weight_row,
            chunk // group_chunks,
            chunk_mask[None, :],
            stride_scales_row,
            stride_origins_row,
            BITS,
            ORIGIN,
        )
        if BLOCK_M == 1:
            column = chunk[:, None] * CHUNK + word[None, :]
            x_ptrs = x_ptr + first_token.to(tl.int64) * stride_x_token + column
            products = tl.zeros([BLOCK_N, BLOCK_CHUNKS, WORDS], dtype=tl.float32)
            x_sum = tl.zeros([BLOCK_CHUNKS, WORDS], dtype=tl.float32)
            for place in tl.static_range(PLACES):  # pyright: ignore[reportGeneralTypeIssues]
                if EVEN_K:
                    x = tl.load(x_ptrs + place * WORDS).to(tl.float32)
                else:
                    x = tl.load(x_ptrs + place * WORDS, mask=chunk_mask[:, None], other=0.0).to(tl.float32)
                products += units(words, place, BITS) * x[None]
                x_sum += x
            wide += step[:, :, None] * products + origin[:, :, None] * x_sum[None]
        else:
            flat = tl.arange(0, BLOCK_CHUNKS * WORDS)
            column = start * CHUNK + flat // WORDS * CHUNK + flat % WORDS
            x_ptrs = x_ptr + token[:, None].to(tl.int64) * stride_x_token + column[None, :]
            x_mask = (token < num_tokens)[:, None] & (column < num_chunks * CHUNK)[None, :]
            for place in tl.static_range(PLACES):  # pyright: ignore[reportGeneralTypeIssues]
                x = tl.load(x_ptrs + place * WORDS, mask=x_mask, other=0.0)
                weight = units(words, place, BITS) * step[:, :, None] + origin[:, :, None]
                weight = tl.reshape(weight, [BLOCK_N, BLOCK_CHUNKS * WORDS]).to(x.dtype)
                total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    if BLOCK_M == 1:
        sums = tl.sum(tl.sum(wide, axis=2), axis=1)[None, :]
    else:
        sums = tl.trans(total)
    if BIAS:
        sums += tl.load(bias_ptr + weight_row).to(tl.float32)[None, :]
    output_ptrs = output_ptr + token[:, None].to(tl.int64) * stride_output_token + row[None, :]
    mask = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    tl.store(output_ptrs, sums.to(output_ptr.dtype.element_ty), mask=mask)


def int_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bits: int,
    zero_points: Tensor | None = None,
    minimums: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """`y = x W^T + b` with `W[n, k] = (q[n, k] - z[n, g]) * s[n, g]`, or `q[n, k] * s[n, g] + m[n, g]`, g the group of k.

    A group is K / num_groups inputs that follow one another. One token is summed in fp32 throughout; of several the weight
    is rounded to x.dtype, as the matrix unit takes it, and summed in fp32.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1); K a multiple of 32
        words: int32 [N, K * bits / 32], strides (any, 1): codes q in chunks, see `kernels.reference.int_words.to_chunks`
        scales: float32, bfloat16 or float16 [N, num_groups], strides (any, 1); a group is a multiple of 32, or all of K
        bits: 4 or 8
        zero_points: uint8 [N, num_groups], strides (any, 1); or None: with no minimums either, z = 2^(bits - 1)
        minimums: scales.dtype [N, num_groups], strides (any, 1), or None
        bias: x.dtype [N], stride (1,)
        tiles: how to cut the product, by default chosen from the sizes; block_k a power of two from 32, with block_m from 16
            on at least 16 words
    Returns:
        x.dtype [num_tokens, N]. Nothing is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    if bits not in BITS:
        raise ValueError(f"bits is {bits}; allowed are {', '.join(map(str, BITS))}")
    check_float_dtype("x", x)
    check_float_dtype("scales", scales)
    num_tokens, num_columns = x.shape
    num_rows, num_groups = scales.shape
    if num_columns % CHUNK:
        raise ValueError(f"x has {num_columns} columns; expected a multiple of {CHUNK}")
    num_chunks = num_columns // CHUNK
    if num_groups > 1 and (num_groups < 1 or num_chunks % num_groups):
        raise ValueError(f"scales have {num_groups} groups, of which {num_columns} columns are no multiples of {CHUNK}")
    check_tensor("x", x, (None, None), x.dtype, x.device)
    check_tensor("words", words, (num_rows, num_chunks * bits), torch.int32, x.device)
    check_tensor("scales", scales, (num_rows, num_groups), scales.dtype, x.device)
    if zero_points is not None and minimums is not None:
        raise ValueError("zero_points and minimums are both given; expected one of them at most")
    if zero_points is not None:
        check_tensor("zero_points", zero_points, (num_rows, num_groups), torch.uint8, x.device)
    if minimums is not None:
        check_tensor("minimums", minimums, (num_rows, num_groups), scales.dtype, x.device)
    origins = minimums if zero_points is None else zero_points
    if bias is not None:
        check_tensor("bias", bias, (num_rows,), x.dtype, x.device)
    tiles = tiles or default_int_tiles(num_tokens, num_columns, bits)
    output = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    if output.numel() == 0:
        return output
    _int_linear_kernel[(triton.cdiv(num_rows, tiles.block_n), triton.cdiv(num_tokens, tiles.block_m))](
        output,
        x,
        words,
        scales,
        origins,
        bias,
        num_tokens,
        num_rows,
        num_chunks,
        num_chunks // num_groups,
        output.stride(0),
        x.stride(0),
        words.stride(0),
        scales.stride(0),
        origins.stride(0) if origins is not None else 0,
        BITS=bits,
        ORIGIN="float" if minimums is not None else "integer" if zero_points is not None else "none",
        BIAS=bias is not None,
        EVEN_K=num_columns % tiles.block_k == 0,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_CHUNKS=tiles.block_k // CHUNK,
        CHUNK=CHUNK,
        num_warps=tiles.num_warps,  # pyright: ignore[reportCallIssue]  (launch options, not the kernel's)
        num_stages=tiles.num_stages,  # pyright: ignore[reportCallIssue]
    )
    return output


def default_int_tiles(num_tokens: int, num_columns: int, bits: int) -> Tiles:
    """Tiles for a shape that was not measured."""
    widest = max(CHUNK, triton.next_power_of_2(num_columns))
    if num_tokens == 1:
        return Tiles(1, 4, min(1024, widest), 4, 2)
    block_m = min(64, max(16, triton.next_power_of_2(num_tokens)))
    # At least 16 words, the matrix unit's depth.
    return Tiles(block_m, 64, max(min(128, widest), 512 // bits), 4, 2)
