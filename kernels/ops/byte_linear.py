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
from kernels.ops.byte_projection import few_tokens_kernel, store_scaled
from kernels.ops.checks import check_float_dtype, check_tensor
from kernels.ops.pdl import supports_pdl
from kernels.ops.projection import MIN_BOX_ROWS, Tiles, supports_tma
from kernels.ops.split_sums import sum_splits

CHUNK = 128  # bytes
MAX_FEW_TOKENS = 16  # that `project_bytes` takes at once
ROW_BYTES = 16  # of which rows are multiples that are loaded so many at a time
ROWS_IN_BAND = tl.constexpr(8)  # in tiles


@triton.jit(do_not_specialize=["num_tokens"])
def many_tokens_kernel(
    output_ptr,
    partial_ptr,
    counters_ptr,
    x_ptr,
    x_scales_ptr,
    codes_ptr,
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
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M tokens, summed over one of SPLITS shares of the inputs; the last of them adds up.

    With TMA `x_ptr` and `codes_ptr` are descriptors. Grid: (cdiv(num_rows, BLOCK_N) * cdiv(num_tokens, BLOCK_M), SPLITS).
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
    if PDL:
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
            scales_ptr,
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


def check_layer(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
    output: Tensor | None,
) -> Tensor:
    """The output, a new one where there is none. Raises ValueError as `check_tensor`; see `fp8_linear`."""
    check_float_dtype("x", x)
    check_tensor("x", x, (None, None), x.dtype, x.device)
    num_tokens, num_columns = x.shape
    check_tensor("codes", codes, (None, num_columns), dtype, x.device)
    num_rows = codes.shape[0]
    check_tensor("scales", scales, (num_rows, 1), torch.float32, x.device)
    if not scales.is_contiguous():
        raise ValueError(f"scales has strides {list(scales.stride())}; expected them contiguous")
    if bias is not None:
        check_tensor("bias", bias, (num_rows,), x.dtype, x.device)
    if residual is not None:
        check_tensor("residual", residual, (num_tokens, num_rows), x.dtype, x.device)
    if output is None:
        output = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    check_tensor("output", output, (num_tokens, num_rows), x.dtype, x.device)
    return output


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
    has_whole_rows = all(value % ROW_BYTES == 0 for value in (num_columns, codes.stride(0), codes.data_ptr()))
    tiles = tiles or default_byte_tiles(num_tokens, num_rows, num_columns, has_whole_rows=has_whole_rows)
    row_tiles, token_tiles = triton.cdiv(num_rows, tiles.block_n), triton.cdiv(num_tokens, tiles.block_m)
    terms = (bias, residual)
    sizes = (num_tokens, num_rows, num_columns)
    stride_residual_token = 0 if residual is None else residual.stride(0)
    pdl = supports_pdl(x.device)
    options = {
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "PDL": pdl,
        "num_warps": tiles.num_warps,
        "launch_pdl": pdl,
    }
    if tiles.block_m <= MAX_FEW_TOKENS:
        if not has_whole_rows:
            raise ValueError(f"codes has rows that are not of whole {ROW_BYTES} bytes; block_m has to be from 32")
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
            EVEN=num_columns % (2 * CHUNK * tiles.num_warps) == 0,
            SHARES=tiles.num_warps,
            ASM=x.is_cuda,
            num_stages=1,  # pyright: ignore[reportCallIssue]  (a launch option, not the kernel's)
            **options,
        )
        return output
    tma = supports_tma(x.device) and has_whole_rows and tiles.block_n >= MIN_BOX_ROWS
    num_tiles = row_tiles * token_tiles
    splits = max(1, min(8, 264 // num_tiles, num_columns // (4 * tiles.block_k)))
    partial_shape = (num_tiles * splits, tiles.block_n, tiles.block_m) if splits > 1 else (0,)
    is_int8 = codes.dtype == torch.int8
    many_tokens_kernel[(num_tiles, splits)](
        output,
        torch.empty(partial_shape, dtype=torch.int32 if is_int8 else torch.float32, device=x.device),
        arrival_counters(x.device, num_tiles),
        _boxes_of(x, tiles.block_m, tiles.block_k) if tma else x,
        x_scales,
        _boxes_of(codes, tiles.block_n, tiles.block_k) if tma else codes,
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
        BLOCK_K=tiles.block_k,
        num_stages=tiles.num_stages,  # pyright: ignore[reportCallIssue]
        **options,
    )
    return output


def default_byte_tiles(num_tokens: int, num_rows: int, num_columns: int, *, has_whole_rows: bool = True) -> Tiles:
    """Tiles for a shape that was not measured."""
    if num_tokens <= MAX_FEW_TOKENS and has_whole_rows:
        block_m = 1 if num_tokens == 1 else 8 if num_tokens <= 8 else 16
        # More shares keep more of a narrow layer's loads under way.
        shares = 4 if num_rows >= 16384 else 8
        shares = min(shares, triton.next_power_of_2(triton.cdiv(num_columns, CHUNK)))
        return Tiles(block_m, 16 if num_tokens == 1 else 32, CHUNK, shares, 1)
    if num_tokens <= 64:
        return Tiles(max(32, triton.next_power_of_2(num_tokens)), 128 if num_rows >= 16384 else 64, CHUNK, 4, 4)
    # As much shared memory as a consumer card has.
    return Tiles(128, 128, CHUNK, 8, 3)


def _boxes_of(tensor: Tensor, box_rows: int, box_columns: int) -> TensorDescriptor:
    """What a kernel loads boxes of `tensor` by; what lies outside of it reads as 0."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [box_rows, box_columns])
