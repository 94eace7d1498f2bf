"""What the launchers of products with integer codes share: checks, and how few tokens' products are cut.

Not an op.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.ops.checks import check_float_dtype, check_product, check_tensor
from kernels.ops.pdl import supports_pdl
from kernels.ops.projection import ProductLaunch, Tiles, default_tiles, product_launch
from kernels.ops.registers import all_registers
from kernels.reference.code_grid import CodeGrid
from kernels.reference.int_words import CHUNK

BITS = (4, 8)
MIN_GROUP = 32  # columns
MAX_FEW_TOKENS = 16  # that `project_codes` takes at once
MAX_REGISTER_TOKENS = 32  # that `project_in_registers` does
# Of 16 rows' words by a warp, so many that its registers hold: a share that is no longer is asked for all at once.
MAX_LOADS = 8
MAX_LOADS_ALONE = 16  # of up to 8 tokens, beside nothing but scales
CHUNKS_AHEAD = 2  # of a longer share
# What stands above a code's bits, twice, see `kernels.ops.int_codes`.
MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400, torch.float32: 0}


class CodeArguments(NamedTuple):
    """What kernels take of a weight of codes."""

    scales: Tensor
    origins: Tensor | None
    num_rows: int
    num_chunks: int
    strides: tuple[int, int, int, int, int]  # of words' rows, of rows and groups of scales, of those of origins
    options: dict[str, Any]  # BITS, ORIGIN, GROUP


def code_arguments(
    x: Tensor,
    words: Tensor,
    bits: int,
    scales: Tensor,
    zero_points: Tensor | None,
    minimums: Tensor | None,
    *,
    name: str = "words",
) -> CodeArguments:
    """Check a weight of codes, which the op calls `name`, against `x`. Raises ValueError, see `int_linear`."""
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
    check_tensor(name, words, (num_rows, num_chunks * 4 * bits), torch.int32, x.device)
    if zero_points is not None and minimums is not None:
        raise ValueError("zero_points and minimums are both given; expected one of them at most")
    origins = minimums if zero_points is None else zero_points
    for part, tensor, dtype in (
        ("scales", scales, scales.dtype),
        ("zero_points", zero_points, torch.int16),
        ("minimums", minimums, scales.dtype),
    ):
        if tensor is not None:
            _check_grid(part, tensor, (num_rows, num_groups), dtype, x.device)
    return CodeArguments(
        scales,
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


def few_tokens_options(num_columns: int, tiles: Tiles, bits: int, origin: str) -> dict[str, Any]:
    """The constants of `project_codes`, and of the launch, that say how it is cut.

    Args:
        origin: ORIGIN of `code_arguments`.
    """
    most = MAX_LOADS_ALONE if tiles.block_m <= 8 and origin == "none" else MAX_LOADS
    options = share_options(num_columns, tiles.num_warps, most * 16 * 4 // (tiles.block_n * bits))
    # Measured on an H200: long shares of few tokens gain more from further programs on a multiprocessor than from registers,
    # where there are two of them to a program, and where codes of 8 bits are cut into eight.
    prefers_programs = tiles.block_m <= 8 and not options["ONCE"]
    prefers_programs = prefers_programs and (
        tiles.num_warps >= 8 if bits == 8 else tiles.num_warps <= 2 and origin == "none"
    )
    if not prefers_programs:
        options |= all_registers(tiles.num_warps)
    return options | {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "num_stages": 1}


def share_options(num_columns: int, shares: int, most_at_once: int) -> dict[str, Any]:
    """How each warp of a program goes through its share of the inputs.

    Args:
        most_at_once: chunks of a share that a warp's registers hold beside everything else.
    """
    steps = triton.cdiv(triton.cdiv(num_columns, CHUNK), shares)
    once = steps <= most_at_once
    ahead = steps if once else CHUNKS_AHEAD
    return {
        "EVEN": num_columns % ((1 if once else ahead) * CHUNK * shares) == 0,
        "AHEAD": ahead,
        "ONCE": once,
        "SHARES": shares,
        "num_warps": shares,
    }


def default_int_tiles(num_tokens: int, num_rows: int, num_columns: int, bits: int) -> Tiles:
    """Tiles for a shape that was not measured."""
    if num_tokens <= MAX_FEW_TOKENS:
        # Measured on an H200 with the layers of Llama-3.1-8B: where there are many rows, few shares keep programs long enough;
        # long rows want many shares, and a narrow layer many programs.
        block_m = 1 if num_tokens == 1 else 8 if num_tokens <= 8 else 16
        num_chunks = triton.cdiv(num_columns, CHUNK)
        if bits == 8 and num_tokens <= 8:
            block_n, shares = 16, 8 if num_chunks > 32 else 4
        elif num_rows >= 16384:
            block_n, shares = 32, 2
        elif num_chunks > 32:
            block_n, shares = 32, 8
        else:
            block_n, shares = 32 if num_rows > 4096 else 16, 4
        return Tiles(block_m, block_n, CHUNK, min(shares, triton.next_power_of_2(num_chunks)), 1)
    if num_tokens <= MAX_REGISTER_TOKENS:
        return Tiles(32, 128, CHUNK, 8, 1)
    return Tiles(64, 128 if num_rows >= 16384 else 64, CHUNK, 4, 3)


class FusedLaunch(NamedTuple):
    """What the launch of a kernel takes for a product in halves, with a matrix or with codes."""

    product: ProductLaunch  # its weight: codes, where there are any
    tiles: Tiles
    # scales, origins, magic, num_chunks, and the strides of rows and groups of scales and of origins
    codes: tuple[Tensor | None, Tensor | None, int, int, int, int, int, int]


NO_CODES = (None, None, 0, 0, 0, 0, 0, 0)


def check_fused_product(
    x: Tensor, weight: Tensor, square_sums: Tensor | None, bias: Tensor | None, code_grid: CodeGrid | None
) -> CodeArguments | None:
    """`check_product`, or with a `code_grid` what it gives for a weight of codes.

    Raises ValueError as `check_product` and `code_arguments`, and where codes come with square_sums or for too many tokens.
    """
    if code_grid is None:
        check_product(x, weight, square_sums, bias)
        return None
    if square_sums is not None:
        raise ValueError("square_sums are given with a code_grid; expected None, codes take an x that is normed")
    code = code_arguments(x, weight, *code_grid, name="weight")
    if len(x) > MAX_FEW_TOKENS:
        raise ValueError(f"x has {len(x)} tokens; with a code_grid at most {MAX_FEW_TOKENS} are allowed")
    if bias is not None:
        check_tensor("bias", bias, (code.num_rows,), x.dtype, x.device)
    return code


def fused_launch(
    x: Tensor, weight: Tensor, square_sums: Tensor | None, code: CodeArguments | None, tiles: Tiles | None
) -> FusedLaunch:
    """Of what `check_fused_product` let pass, and gave. Raises ValueError: these tiles are none for codes."""
    num_tokens, num_columns = x.shape
    if code is None:
        tiles = tiles or default_tiles(num_tokens, len(weight), num_columns)
        product = product_launch(x, weight, square_sums, tiles, box_rows=tiles.block_n // 2)
        constants = {"BITS": 0, "ORIGIN": "none", "GROUP": 0, "EVEN": False, "AHEAD": 1, "ONCE": False, "SHARES": 1}
        return FusedLaunch(product._replace(options=product.options | constants), tiles, NO_CODES)
    tiles = tiles or default_int_tiles(num_tokens, len(weight), num_columns, code.options["BITS"])
    if tiles.block_m not in (1, 8, 16) or tiles.block_n % 16:
        raise ValueError(f"tiles are {tiles}; with a code_grid block_m is 1, 8 or 16 and block_n a multiple of 16")
    pdl = supports_pdl(x.device)
    matrix = {"EVEN_K": False, "BLOCK_K": 0, "BLOCK_PARTS": 0, "SMALL": False, "TMA": False}
    options = (
        matrix
        | code.options
        | few_tokens_options(num_columns, tiles, code.options["BITS"], code.options["ORIGIN"])
        | {"PDL": pdl, "launch_pdl": pdl}
    )
    codes = (code.scales, code.origins, MAGIC[x.dtype], code.num_chunks, *code.strides[1:])
    return FusedLaunch(ProductLaunch(x, weight, 0, 0, options), tiles, codes)


def _check_grid(name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """`check_tensor` without its last dimension having to be dense."""
    narrow = tensor[:, :1]
    check_tensor(name, narrow, (shape[0], min(1, shape[1])), dtype, device)
    if tensor.shape[1] != shape[1]:
        raise ValueError(f"{name} has {tensor.shape[1]} groups; expected {shape[1]}")
