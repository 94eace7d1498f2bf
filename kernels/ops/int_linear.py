"""A linear layer over integer codes of 4 or 8 bits with a scale per group of inputs, in Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.ops.arrivals import arrival_counters
from kernels.ops.checks import check_float_dtype, check_tensor
from kernels.ops.code_projection import project_codes
from kernels.ops.dequantize_codes import dequantize_codes
from kernels.ops.int_codes import chunk_part
from kernels.ops.pdl import supports_pdl
from kernels.ops.projection import Tiles
from kernels.ops.split_sums import is_last
from kernels.reference.int_words import CHUNK

BITS = (4, 8)
MIN_GROUP = 32  # columns
MAX_FEW_TOKENS = 16  # that `project_codes` takes at once
MAX_TOKENS = 256  # above, the library's product of the dequantized weight is faster
# What stands above a code's bits, twice, see `kernels.ops.int_codes`.
MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400, torch.float32: 0}


@triton.jit(do_not_specialize=["num_tokens", "magic"])
def _few_tokens_kernel(
    output_ptr,
    x_ptr,
    words_ptr,
    scales_ptr,
    origins_ptr,
    bias_ptr,
    residual_ptr,
    magic,
    num_tokens,
    num_rows,
    num_columns,
    num_chunks,
    stride_output_token,
    stride_x_token,
    stride_words_row,
    stride_scales_row,
    stride_scales_group,
    stride_origins_row,
    stride_origins_group,
    stride_residual_token,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens per program. Grid: (cdiv(num_rows, BLOCK_N), cdiv(num_tokens, BLOCK_M))."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_N
    first_token = tl.program_id(1) * BLOCK_M
    total = project_codes(
        x_ptr,
        words_ptr,
        scales_ptr,
        origins_ptr,
        magic,
        first_row,
        first_row + BLOCK_N // 2,
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
        BITS,
        ORIGIN,
        GROUP,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        SHARES,
        PDL,
    )
    row = first_row + tl.arange(0, BLOCK_N)
    token = first_token + tl.arange(0, BLOCK_M)
    mask = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    if BIAS:
        total += tl.load(bias_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        residual_ptrs = residual_ptr + token[:, None].to(tl.int64) * stride_residual_token + row[None, :]
        total += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    output_ptrs = output_ptr + token[:, None].to(tl.int64) * stride_output_token + row[None, :]
    tl.store(output_ptrs, total.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _wide_codes(words, zero, magic, PART: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr):
    """Words [rows, 16] -> codes without their zero, DTYPE [rows, 128 / PARTS]."""
    codes = chunk_part(words, magic, PART, PARTS, DTYPE)
    if PARTS == 1:
        codes = tl.permute(codes, [0, 2, 3, 1, 4])
    elif PARTS == 2:
        codes = tl.permute(codes, [0, 2, 1, 3])
    return tl.reshape(codes, [ROWS, 128 // PARTS]) - zero


@triton.jit(do_not_specialize=["num_tokens", "magic"])
def _many_tokens_kernel(
    output_ptr,
    partial_ptr,
    counters_ptr,
    x_ptr,
    words_ptr,
    scales_ptr,
    origins_ptr,
    bias_ptr,
    residual_ptr,
    magic,
    num_tokens,
    num_rows,
    num_columns,
    num_chunks,
    stride_output_token,
    stride_x_token,
    stride_words_row,
    stride_scales_row,
    stride_scales_group,
    stride_origins_row,
    stride_origins_group,
    stride_residual_token,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BITS: tl.constexpr,
    ORIGIN: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens, summed over one of SPLITS shares of the inputs; the last of them adds up.

    Grid: (cdiv(num_rows, BLOCK_N), cdiv(num_tokens, BLOCK_M), SPLITS).
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    ABOVE: tl.constexpr = 1024.0 if DTYPE == tl.float16 else 128.0  # pyright: ignore[reportAssignmentType]
    PARTS: tl.constexpr = 1 if GROUP % 128 == 0 else 2 if GROUP % 64 == 0 else 4  # pyright: ignore[reportAssignmentType]
    WIDTH: tl.constexpr = 128 // PARTS
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token_mask = token < num_tokens
    word_ptrs = words_ptr + weight_row[:, None] * stride_words_row + tl.arange(0, 16)[None, :]
    column = tl.arange(0, WIDTH)
    x_ptrs = x_ptr + token[None, :].to(tl.int64) * stride_x_token + column[:, None]
    scale_ptrs = scales_ptr + weight_row * stride_scales_row
    origin_ptrs = scale_ptrs if ORIGIN == "none" else origins_ptr + weight_row * stride_origins_row
    per_split = (num_chunks + SPLITS - 1) // SPLITS
    begin = tl.program_id(2) * per_split
    end = tl.minimum(begin + per_split, num_chunks)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for chunk in range(begin, end):
        low = tl.load(word_ptrs + chunk * (4 * BITS))
        if BITS == 8:
            high = tl.load(word_ptrs + chunk * (4 * BITS) + 16)
        for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
            first = chunk * 128 + part * WIDTH
            if EVEN_K:
                x = tl.load(x_ptrs + first, mask=token_mask[None, :], other=0.0)
                group = first // GROUP if GROUP > 0 else 0
            else:
                inside = (first + column < num_columns)[:, None]
                x = tl.load(x_ptrs + first, mask=token_mask[None, :] & inside, other=0.0)
                # Columns past the end are 0, whatever their scale.
                group = tl.minimum(first, num_columns - 1) // GROUP if GROUP > 0 else 0
            scale = tl.load(scale_ptrs + group * stride_scales_group).to(tl.float32)
            if ORIGIN == "none":
                zero_low = tl.full([1, 1], ABOVE + (8.0 if BITS == 4 else 0.0), DTYPE)
                zero_high = tl.full([1, 1], ABOVE + 8.0, DTYPE)
            elif ORIGIN == "integer":
                zero = tl.load(origin_ptrs + group * stride_origins_group)
                zero_low = ((zero & 15).to(tl.float32) + ABOVE).to(DTYPE)[:, None]
                zero_high = ((zero >> 4).to(tl.float32) + ABOVE).to(DTYPE)[:, None]
            else:
                zero_low = tl.full([1, 1], ABOVE, DTYPE)
                zero_high = tl.full([1, 1], ABOVE, DTYPE)
            # "ieee": float32 is not to be rounded to TF32.
            sums = tl.dot(_wide_codes(low, zero_low, magic, part, PARTS, DTYPE, BLOCK_N), x, input_precision="ieee")
            if BITS == 8:
                codes = _wide_codes(high, zero_high, magic, part, PARTS, DTYPE, BLOCK_N)
                sums += 16.0 * tl.dot(codes, x, input_precision="ieee")
            total += scale[:, None] * sums
            if ORIGIN == "float":
                minimum = tl.load(origin_ptrs + group * stride_origins_group).to(tl.float32)
                total += minimum[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
    owner = True
    if SPLITS > 1:
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        partial_ptrs = partial_ptr + (tile * SPLITS).to(tl.int64) * (BLOCK_N * BLOCK_M) + place
        tl.store(partial_ptrs + tl.program_id(2) * (BLOCK_N * BLOCK_M), total)
        owner = is_last(counters_ptr + tile, SPLITS)
        if owner:
            total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for split in range(SPLITS):
                # ".cg": straight from the L2, where the other programs' sums are.
                total += tl.load(partial_ptrs + split * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    if owner:
        mask = (row < num_rows)[:, None] & token_mask[None, :]
        if BIAS:
            total += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
        if RESIDUAL:
            residual_ptrs = residual_ptr + token[None, :].to(tl.int64) * stride_residual_token + row[:, None]
            total += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        output_ptrs = output_ptr + token[None, :].to(tl.int64) * stride_output_token + row[:, None]
        tl.store(output_ptrs, total.to(output_ptr.dtype.element_ty), mask=mask)


class CodeArguments(NamedTuple):
    """What kernels take of a weight of codes."""

    origins: Tensor | None
    num_rows: int
    num_chunks: int
    strides: tuple[int, int, int, int, int]  # of words' rows, of rows and groups of scales, of those of origins
    options: dict[str, Any]  # BITS, ORIGIN, GROUP


def code_arguments(
    x: Tensor, words: Tensor, scales: Tensor, bits: int, zero_points: Tensor | None, minimums: Tensor | None
) -> CodeArguments:
    """Check a weight of codes against `x`. Raises ValueError, see `int_linear`."""
    if bits not in BITS:
        raise ValueError(f"bits is {bits}; allowed are {', '.join(map(str, BITS))}")
    check_float_dtype("x", x)
    check_float_dtype("scales", scales)
    num_columns = x.shape[1]
    num_rows, num_groups = scales.shape
    num_chunks = triton.cdiv(num_columns, CHUNK)
    if num_groups > 1 and (num_columns % num_groups or num_columns // num_groups % MIN_GROUP):
        raise ValueError(
            f"scales have {num_groups} groups, of which {num_columns} columns are no multiples of {MIN_GROUP}"
        )
    check_tensor("x", x, (None, None), x.dtype, x.device)
    check_tensor("words", words, (num_rows, num_chunks * 4 * bits), torch.int32, x.device)
    if zero_points is not None and minimums is not None:
        raise ValueError("zero_points and minimums are both given; expected one of them at most")
    origins = minimums if zero_points is None else zero_points
    for name, tensor, dtype in (
        ("scales", scales, scales.dtype),
        ("zero_points", zero_points, torch.int16),
        ("minimums", minimums, scales.dtype),
    ):
        if tensor is not None:
            _check_grid(name, tensor, (num_rows, num_groups), dtype, x.device)
    return CodeArguments(
        origins,
        num_rows,
        num_chunks,
        (words.stride(0), *scales.stride(), *(origins.stride() if origins is not None else (0, 0))),
        {
            "BITS": bits,
            "ORIGIN": "float" if minimums is not None else "integer" if zero_points is not None else "none",
            "GROUP": num_columns // num_groups if num_groups > 1 else 0,
        },
    )


def few_tokens_options(num_columns: int, tiles: Tiles) -> dict[str, Any]:
    """The constants of `project_codes`, and of the launch, that say how it is cut."""
    shares = tiles.num_warps
    return {
        "EVEN": num_columns % (2 * CHUNK * shares) == 0,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "SHARES": shares,
        "num_warps": shares,
        "num_stages": 1,
    }


def int_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bits: int,
    zero_points: Tensor | None = None,
    minimums: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    output: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """`y = x W^T + b + r` with `W[n, k] = (q[n, k] - z[n, g]) * s[n, g]`, or `q[n, k] * s[n, g] + m[n, g]`, g the group of k.

    A group is K / num_groups inputs that follow one another. Products are of codes, which are exact in every dtype; they are
    summed and scaled in fp32. Above 256 tokens the weight is rounded to x.dtype instead, for the library's product.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1)
        words: int32 [N, cdiv(K, 128) * 4 * bits], strides (any, 1): codes q, see `kernels.reference.int_words.to_chunks`
        scales: float32, bfloat16 or float16 [N, num_groups], any strides; a group is a multiple of 32, or all of K
        bits: 4 or 8
        zero_points: int16 [N, num_groups], any strides; or None: with no minimums either, z = 2^(bits - 1). Not bytes: beside
            those the compiler would lay the codes out in another way than the matrix unit takes them
        minimums: scales.dtype [N, num_groups], any strides, or None
        bias: x.dtype [N], stride (1,)
        residual: x.dtype [num_tokens, N], strides (any, 1)
        output: where to write, x.dtype [num_tokens, N], strides (any, 1); may be `residual`; a new tensor by default
        tiles: how to cut the product, by default chosen from the sizes. With block_m 1, 8 or 16 a warp takes a share of the
            inputs, and block_n is a multiple of 16; with more, block_n is from 64
    Returns:
        x.dtype [num_tokens, N]. Nothing but `output` is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    code = code_arguments(x, words, scales, bits, zero_points, minimums)
    num_tokens, num_columns = x.shape
    if bias is not None:
        check_tensor("bias", bias, (code.num_rows,), x.dtype, x.device)
    if residual is not None:
        check_tensor("residual", residual, (num_tokens, code.num_rows), x.dtype, x.device)
    if output is None:
        output = torch.empty((num_tokens, code.num_rows), dtype=x.dtype, device=x.device)
    check_tensor("output", output, (num_tokens, code.num_rows), x.dtype, x.device)
    if output.numel() == 0:
        return output
    if tiles is None and num_tokens > MAX_TOKENS:
        weight = dequantize_codes(words, scales, bits, num_columns, zero_points, minimums, dtype=x.dtype)
        product = F.linear(x, weight, bias)
        return output.copy_(product if residual is None else product.add_(residual))
    tiles = tiles or default_int_tiles(num_tokens, code.num_rows, num_columns)
    tensors = (x, words, scales, code.origins, bias, residual)
    sizes = (MAGIC[x.dtype], num_tokens, code.num_rows, num_columns, code.num_chunks)
    strides = (output.stride(0), x.stride(0), *code.strides, 0 if residual is None else residual.stride(0))
    options = code.options | {"BIAS": bias is not None, "RESIDUAL": residual is not None}
    grid = (triton.cdiv(code.num_rows, tiles.block_n), triton.cdiv(num_tokens, tiles.block_m))
    if tiles.block_m <= MAX_FEW_TOKENS:
        pdl = supports_pdl(x.device)
        _few_tokens_kernel[grid](
            output,
            *tensors,
            *sizes,
            *strides,
            **options,
            **few_tokens_options(num_columns, tiles),
            PDL=pdl,
            launch_pdl=pdl,  # pyright: ignore[reportCallIssue]  (a launch option, not the kernel's)
        )
        return output
    splits = _num_splits(grid[0] * grid[1], code.num_chunks)
    partial_shape = (grid[0] * grid[1] * splits, tiles.block_n, tiles.block_m) if splits > 1 else (0,)
    _many_tokens_kernel[(*grid, splits)](
        output,
        torch.empty(partial_shape, dtype=torch.float32, device=x.device),
        arrival_counters(x.device, grid[0] * grid[1]),
        *tensors,
        *sizes,
        *strides,
        **options,
        EVEN_K=num_columns % CHUNK == 0,
        SPLITS=splits,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,  # pyright: ignore[reportCallIssue]
        num_stages=tiles.num_stages,  # pyright: ignore[reportCallIssue]
    )
    return output


def default_int_tiles(num_tokens: int, num_rows: int, num_columns: int) -> Tiles:
    """Tiles for a shape that was not measured."""
    if num_tokens <= MAX_FEW_TOKENS:
        block_m = 1 if num_tokens == 1 else 8 if num_tokens <= 8 else 16
        # More shares keep more of a narrow layer's loads under way.
        wide = num_rows >= 16384
        shares = 2 if wide else 8 if num_rows <= 4096 else 4
        block_n = 32 if wide or num_columns <= 4096 else 16
        return Tiles(block_m, block_n, CHUNK, min(shares, triton.next_power_of_2(triton.cdiv(num_columns, CHUNK))), 1)
    block_m = min(64, triton.next_power_of_2(num_tokens))
    return Tiles(block_m, 128 if num_rows >= 16384 else 64, CHUNK, 4, 3)


def _num_splits(num_programs: int, num_chunks: int) -> int:
    """So that there are programs for some hundred multiprocessors, and no share is of fewer than 4 chunks."""
    return max(1, min(8, 264 // num_programs, num_chunks // 4))


def _check_grid(name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """`check_tensor` without its last dimension having to be dense."""
    narrow = tensor[:, :1]
    check_tensor(name, narrow, (shape[0], min(1, shape[1])), dtype, device)
    if tensor.shape[1] != shape[1]:
        raise ValueError(f"{name} has {tensor.shape[1]} groups; expected {shape[1]}")
