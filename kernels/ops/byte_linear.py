"""Products of activations and weights that are both in 8 bits, with a scale per token and per row. Not an op: what ops share.

Up to 16 tokens memory bounds the product, and `project_bytes` streams the weight through registers. Above that tiles of both
go through shared memory, by the copy engine where there is one; the weight is the left operand, since Hopper's matrix unit
takes 64 rows of that at least, and 8 columns of the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.ops.arrivals import arrival_counters
from kernels.ops.byte_launch import MAX_FEW_TOKENS, default_byte_tiles, few_tokens_options, has_whole_rows
from kernels.ops.byte_projection import few_tokens_kernel, load_scales, store_scaled
from kernels.ops.pdl import prefetch_rows, supports_pdl
from kernels.ops.projection import MIN_BOX_ROWS, Tiles, supports_tma
from kernels.ops.split_sums import sum_splits

ROWS_IN_BAND = tl.constexpr(8)  # in tiles


@triton.jit(do_not_specialize=["num_tokens"])
def many_tokens_kernel(
    output_ptr,
    partial_ptr,
    counters_ptr,
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    rows_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    num_tokens,
    num_rows,
    num_columns,
    stride_output_token,
    stride_x_token,
    stride_codes_row,
    stride_residual_token,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    INT8: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens, summed over one of SPLITS shares of the inputs; the last of them adds up.

    With TMA `x_ptr` and `codes_ptr` are descriptors. AHEAD bytes of each row, a multiple of 16, are asked for from `rows_ptr`,
    the codes again, while the kernel before this one ends; rows are then of whole 16 bytes.

    Grid: (cdiv(num_rows, BLOCK_N) * cdiv(num_tokens, BLOCK_M), SPLITS).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    SUM: tl.constexpr = tl.int32 if INT8 else tl.float32  # pyright: ignore[reportAssignmentType]
    # Programs side by side share few rows of the weight, so that all tokens find them in the L2.
    tile = tl.program_id(0)
    row_tiles = (num_rows + BLOCK_N - 1) // BLOCK_N
    per_band = ROWS_IN_BAND * ((num_tokens + BLOCK_M - 1) // BLOCK_M)
    first_of_band = tile // per_band * ROWS_IN_BAND
    band = tl.minimum(row_tiles - first_of_band, ROWS_IN_BAND)
    first_row = (first_of_band + tile % per_band % band) * BLOCK_N
    first_token = tile % per_band // band * BLOCK_M

    row = first_row + tl.arange(0, BLOCK_N)
    token = first_token + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    if not TMA:
        code_row = tl.minimum(row, num_rows - 1).to(tl.int64)
        code_ptrs = codes_ptr + code_row[:, None] * stride_codes_row + column[None, :]
        x_ptrs = x_ptr + token[:, None].to(tl.int64) * stride_x_token + column[None, :]
        token_mask = (token < num_tokens)[:, None]
    steps = (num_columns + BLOCK_K - 1) // BLOCK_K
    per_split = (steps + SPLITS - 1) // SPLITS
    begin = tl.program_id(1) * per_split
    end = tl.minimum(begin + per_split, steps)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=SUM)
    scales = load_scales(scales_ptr, row[:, None], num_rows)
    if PDL:
        if AHEAD > 0:
            row_ptrs = rows_ptr + tl.minimum(row, num_rows - 1).to(tl.int64) * stride_codes_row + begin * BLOCK_K
            prefetch_rows(row_ptrs, tl.maximum(tl.minimum(AHEAD, num_columns - begin * BLOCK_K), 16))
        tl.extra.cuda.gdc_wait()
    for step in range(begin, end):
        first = step * BLOCK_K
        if TMA:
            codes = codes_ptr.load([first_row, first])
            x = x_ptr.load([first_token, first])
        elif EVEN_K:
            codes = tl.load(code_ptrs + first)
            x = tl.load(x_ptrs + first, mask=token_mask, other=0.0)
        else:
            inside = (first + column < num_columns)[None, :]
            codes = tl.load(code_ptrs + first, mask=inside, other=0.0)
            x = tl.load(x_ptrs + first, mask=token_mask & inside, other=0.0)
        if INT8:
            total = tl.dot(codes, tl.trans(x), total, out_dtype=tl.int32)
        else:
            # Hopper's matrix unit keeps 14 bits of such sums: in fp32 they are added up between tiles.
            total = tl.dot(codes, tl.trans(x), total, max_num_imprecise_acc=BLOCK_K)
    owner = True
    if SPLITS > 1:
        tile_ptr = partial_ptr + (tile * SPLITS).to(tl.int64) * (BLOCK_N * BLOCK_M)
        total, owner = sum_splits(total, tile_ptr, counters_ptr + tile, tl.program_id(1), SPLITS)
    if owner:
        store_scaled(
            output_ptr,
            total,
            x_scales_ptr,
            scales,
            bias_ptr,
            residual_ptr,
            token[None, :],
            row[:, None],
            num_tokens,
            num_rows,
            stride_output_token,
            stride_residual_token,
            BIAS,
            RESIDUAL,
        )


def multiply_scaled(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    output: Tensor,
    tiles: Tiles | None,
) -> Tensor:
    """`output = (x codes^T) * x_scales * scales^T + bias + residual`, of tensors that `check_layer` has seen.

    Args:
        x: codes.dtype [num_tokens, K], contiguous, and x_scales float32 [num_tokens, 1], likewise
        tiles: how to cut the product. With block_m 1, 8 or 16 a warp takes a share of the inputs, block_n is a multiple of 16
            and rows have to be of whole 16 bytes; with more, block_n is from 64
    """
    num_tokens, num_columns = x.shape
    num_rows = codes.shape[0]
    whole = has_whole_rows(codes)
    tiles = tiles or default_byte_tiles(num_tokens, num_rows, num_columns, has_whole_rows=whole)
    row_tiles, token_tiles = triton.cdiv(num_rows, tiles.block_n), triton.cdiv(num_tokens, tiles.block_m)
    terms = (bias, residual)
    sizes = (num_tokens, num_rows, num_columns)
    stride_residual_token = 0 if residual is None else residual.stride(0)
    flags = {"BIAS": bias is not None, "RESIDUAL": residual is not None}
    if tiles.block_m <= MAX_FEW_TOKENS:
        options = few_tokens_options(codes, tiles)
        words = codes.view(torch.int32)
        few_tokens_kernel[(row_tiles, token_tiles)](
            output,
            x,
            x_scales,
            words,
            scales,
            *terms,
            *sizes,
            output.stride(0),
            x.stride(0),
            words.stride(0),
            stride_residual_token,
            **flags,
            **options,
        )
        return output
    tma = supports_tma(x.device) and whole and tiles.block_n >= MIN_BOX_ROWS
    num_tiles = row_tiles * token_tiles
    splits = max(1, min(8, 264 // num_tiles, num_columns // (4 * tiles.block_k)))
    partial_shape = (num_tiles * splits, tiles.block_n, tiles.block_m) if splits > 1 else (0,)
    is_int8 = codes.dtype == torch.int8
    pdl = supports_pdl(x.device)
    many_tokens_kernel[(num_tiles, splits)](
        output,
        torch.empty(partial_shape, dtype=torch.int32 if is_int8 else torch.float32, device=x.device),
        arrival_counters(x.device, num_tiles),
        _boxes_of(x, tiles.block_m, tiles.block_k) if tma else x,
        x_scales,
        _boxes_of(codes, tiles.block_n, tiles.block_k) if tma else codes,
        codes,
        scales,
        *terms,
        *sizes,
        output.stride(0),
        x.stride(0),
        codes.stride(0),
        stride_residual_token,
        INT8=is_int8,
        TMA=tma,
        EVEN_K=num_columns % tiles.block_k == 0,
        SPLITS=splits,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        AHEAD=tiles.num_stages * tiles.block_k if whole else 0,
        PDL=pdl,
        num_warps=tiles.num_warps,  # pyright: ignore[reportCallIssue]  (launch options, not the kernel's)
        num_stages=tiles.num_stages,  # pyright: ignore[reportCallIssue]
        launch_pdl=pdl,  # pyright: ignore[reportCallIssue]
        **flags,
    )
    return output


def _boxes_of(tensor: Tensor, box_rows: int, box_columns: int) -> TensorDescriptor:
    """What a kernel loads boxes of `tensor` by; what lies outside of it reads as 0."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [box_rows, box_columns])
