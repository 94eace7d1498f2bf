"""What the launchers of products with NormalFloat4 share: checks, and how few tokens' products are cut.

Not an op.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.ops.checks import check_float_dtype, check_tensor
from kernels.ops.code_launch import share_options
from kernels.ops.nf4_levels import LEVEL_SCALE
from kernels.ops.pdl import supports_pdl
from kernels.ops.projection import Tiles
from kernels.ops.registers import all_registers
from kernels.reference.int_words import CHUNK

MIN_BLOCK = 32  # columns
MAX_FEW_TOKENS = 16  # that `project_nf4` takes at once
MAX_CHUNKS = 8  # of 16 rows, that a warp's registers hold beside what looks levels up


def check_nf4_product(
    x: Tensor, words: Tensor, codes: Tensor, steps: Tensor, means: Tensor, bias: Tensor | None
) -> None:
    """What every such product asks of its tensors. Raises ValueError, see `nf4_linear`."""
    check_float_dtype("x", x)
    check_tensor("x", x, (None, None), x.dtype, x.device)
    num_columns = x.shape[1]
    check_tensor("codes", codes[:, :1], (None, 1), torch.int8, x.device)
    num_rows, num_blocks = codes.shape
    if num_blocks > 1 and (num_columns % num_blocks or num_columns // num_blocks % MIN_BLOCK):
        raise ValueError(
            f"codes have {num_blocks} blocks, of which {num_columns} columns are no multiples of {MIN_BLOCK}"
        )
    check_tensor("words", words, (num_rows, triton.cdiv(num_columns, CHUNK) * 16), torch.int32, x.device)
    for name, tensor in (("steps", steps), ("means", means)):
        check_tensor(name, tensor, (num_rows, 1), torch.bfloat16, x.device)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}; expected them contiguous")
    if bias is not None:
        check_tensor("bias", bias, (num_rows,), x.dtype, x.device)


def few_tokens_options(
    num_columns: int, num_blocks: int, dtype: torch.dtype, device: torch.device, tiles: Tiles
) -> dict[str, Any]:
    """The constants of `project_nf4`, and of the launch, that say how it is cut."""
    pdl = supports_pdl(device)
    options = share_options(num_columns, tiles.num_warps, MAX_CHUNKS * 16 // tiles.block_n)
    options |= all_registers(tiles.num_warps)
    return options | {
        "LEVEL_SCALE": LEVEL_SCALE[dtype],
        "BLOCK": block_columns(num_columns, num_blocks),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "ASM": device.type == "cuda",
        "PDL": pdl,
        "num_stages": 1,
        "launch_pdl": pdl,
    }


def block_columns(num_columns: int, num_blocks: int) -> int:
    """Columns of a block as kernels take it: 0 where there is only one."""
    return num_columns // num_blocks if num_blocks > 1 else 0


def default_nf4_tiles(num_tokens: int, num_rows: int, num_columns: int) -> Tiles:
    """Tiles for a shape that was not measured."""
    if num_tokens <= MAX_FEW_TOKENS:
        block_m = 1 if num_tokens == 1 else 8 if num_tokens <= 8 else 16
        # Measured on an H200 with the layers of Llama-3.1-8B, of all of which four shares were best.
        shares = min(4, triton.next_power_of_2(triton.cdiv(num_columns, CHUNK)))
        return Tiles(block_m, 16, CHUNK, shares, 1)
    block_m = min(64, triton.next_power_of_2(num_tokens))
    return Tiles(block_m, 128 if num_rows >= 16384 else 64, CHUNK, 4, 3)
