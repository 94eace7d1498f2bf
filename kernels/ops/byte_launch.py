"""What the launchers of products of 8-bit tokens and weights share: checks, and how few tokens' products are cut.

Not an op.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.ops.checks import FLOAT_DTYPES, check_float_dtype, check_tensor
from kernels.ops.code_launch import share_options
from kernels.ops.pdl import supports_pdl
from kernels.ops.projection import Tiles
from kernels.ops.registers import all_registers
from kernels.reference.token_codes import TokenCodes

CHUNK = 128  # bytes
MAX_FEW_TOKENS = 16  # that `project_bytes` takes at once
MAX_CHUNKS = 8  # of 16 rows, that a warp's registers hold
ROW_BYTES = 16  # of which rows are multiples that are loaded so many at a time


def check_byte_product(
    x: Tensor | TokenCodes, codes: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> None:
    """What a product with a weight in 8 bits asks of its tensors. Raises ValueError as `check_tensor`; see `fp8_linear`."""
    values = x.codes if isinstance(x, TokenCodes) else x
    device = values.device
    if isinstance(x, TokenCodes):
        check_tensor("x.codes", values, (None, None), dtype, device)
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"x.dtype is {x.dtype}; allowed are {', '.join(map(str, FLOAT_DTYPES))}")
        check_tensor("x.scales", x.scales, (len(values), 1), torch.float32, device)
        if not (values.is_contiguous() and x.scales.is_contiguous()):
            raise ValueError("x.codes or x.scales have gaps; expected them contiguous")
    else:
        check_float_dtype("x", x)
        check_tensor("x", x, (None, None), x.dtype, device)
    check_tensor("codes", codes, (None, values.shape[1]), dtype, device)
    num_rows = codes.shape[0]
    check_tensor("scales", scales, (num_rows, 1), torch.float32, device)
    if not scales.is_contiguous():
        raise ValueError(f"scales has strides {list(scales.stride())}; expected them contiguous")
    if bias is not None:
        check_tensor("bias", bias, (num_rows,), x.dtype, device)


def check_layer(
    x: Tensor | TokenCodes,
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
    output: Tensor | None,
) -> Tensor:
    """`check_byte_product`, and the output, a new one where there is none. Raises ValueError likewise."""
    check_byte_product(x, codes, scales, dtype, bias)
    shape = (len(x.codes if isinstance(x, TokenCodes) else x), codes.shape[0])
    if residual is not None:
        check_tensor("residual", residual, shape, x.dtype, codes.device)
    if output is None:
        output = torch.empty(shape, dtype=x.dtype, device=codes.device)
    check_tensor("output", output, shape, x.dtype, codes.device)
    return output


def has_whole_rows(codes: Tensor) -> bool:
    """Whether rows are of whole 16 bytes, and aligned to them."""
    return all(value % ROW_BYTES == 0 for value in (codes.shape[1], codes.stride(0), codes.data_ptr()))


def few_tokens_options(codes: Tensor, tiles: Tiles) -> dict[str, Any]:
    """The constants of `project_bytes`, and of the launch, that say how it is cut. Raises ValueError: it cannot be."""
    if not has_whole_rows(codes):
        raise ValueError(f"codes has rows that are not of whole {ROW_BYTES} bytes; block_m has to be from 32")
    pdl = supports_pdl(codes.device)
    options = share_options(codes.shape[1], tiles.num_warps, MAX_CHUNKS * 16 // tiles.block_n)
    if tiles.num_warps > 2:  # two gain more from further programs on a multiprocessor than from registers
        options |= all_registers(tiles.num_warps)
    return options | {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "ASM": codes.is_cuda,
        "PDL": pdl,
        "num_stages": 1,
        "launch_pdl": pdl,
    }


def default_byte_tiles(num_tokens: int, num_rows: int, num_columns: int, *, has_whole_rows: bool = True) -> Tiles:
    """Tiles for a shape that was not measured."""
    if num_tokens <= MAX_FEW_TOKENS and has_whole_rows:
        block_m = 1 if num_tokens == 1 else 8 if num_tokens <= 8 else 16
        # Measured on an H200 with the layers of Llama-3.1-8B: two shares keep a wide layer's programs long enough, with 16 tokens
        # four; long rows want eight.
        wide = num_rows >= 16384 and num_tokens <= 8
        num_chunks = triton.cdiv(num_columns, CHUNK)
        shares = 2 if wide else 8 if num_chunks > 32 and num_tokens <= 8 else 4
        return Tiles(block_m, 32 if wide else 16, CHUNK, min(shares, triton.next_power_of_2(num_chunks)), 1)
    if num_tokens <= 64:
        # Measured likewise with 64 tokens: narrow layers, whose programs share a row's inputs, want more of them under way.
        wide = num_rows >= 16384
        stages = 5 if num_tokens > 32 and not wide else 4
        return Tiles(max(32, triton.next_power_of_2(num_tokens)), 128 if wide else 64, CHUNK, 4, stages)
    if num_tokens <= 128:
        # Measured likewise with 128 tokens, a third less than of 128 rows at once: more programs share the weight's bytes.
        return Tiles(128, 64, CHUNK, 4, 4)
    # As much shared memory as a consumer card has.
    return Tiles(128, 128, CHUNK, 8, 3)
