"""Where the tokens of a speculative round stand."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.round_positions import round_positions

SHAPES: dict[str, dict[str, Any]] = {
    "1 of 6": {"num_rows": 1, "width": 6, "max_num_blocks": 512},
    "32 of 6": {"num_rows": 32, "width": 6, "max_num_blocks": 512},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_rows: int = 5,
    num_groups: int = 1,
    width: int = 4,
    max_num_blocks: int = 6,
    block_size: int = 16,
) -> Inputs:
    """Drafts from none to all, and about every fifth row without a request. There are no floats: `dtype` says nothing."""
    generator = torch.Generator(device).manual_seed(seed)
    longest = max_num_blocks * block_size - width
    num_computed = torch.randint(longest + 1, (num_rows,), device=device, generator=generator)
    is_padding = torch.rand(num_rows, device=device, generator=generator) < 0.2
    block_ids = torch.randperm(num_groups * num_rows * max_num_blocks, device=device, generator=generator) + 1
    return {
        "counts": torch.randint(width, (num_rows,), device=device, generator=generator) * ~is_padding,
        "num_computed": num_computed.masked_fill(is_padding, -1),
        "block_tables": block_ids.int().view(num_groups, num_rows, max_num_blocks),
        "width": width,
        "block_size": block_size,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Count, length and start of each row, and of each place its block ids, and what `RoundPositions` says of it."""
    num_rows, num_groups = len(inputs["counts"]), len(inputs["block_tables"])
    return num_rows * (16 + 8 + 8) + num_rows * inputs["width"] * (8 + 8 + 8 + 8 + 4 + num_groups * (4 + 16))


def flops(inputs: Inputs) -> int:
    return 0


OP = KernelOp(
    name="round_positions",
    reference=round_positions,
    make_inputs=make_inputs,
    # Integers are equal or wrong.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
