"""Where a decode step's tokens stand."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.decode_positions import decode_positions

SHAPES: dict[str, dict[str, Any]] = {
    "1 of 256 blocks": {"num_reqs": 1, "max_num_blocks": 256},
    "256 of 512 blocks": {"num_reqs": 256, "max_num_blocks": 512},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_reqs: int = 7,
    max_num_blocks: int = 5,
    block_size: int = 16,
) -> Inputs:
    """Lengths from 0, which is padding, to the table's end. There are no floats: `dtype` says nothing."""
    generator = torch.Generator(device).manual_seed(seed)
    longest = max_num_blocks * block_size
    block_ids = torch.randperm(num_reqs * max_num_blocks, device=device, generator=generator) + 1
    return {
        "seq_lens": torch.randint(longest + 1, (num_reqs,), device=device, generator=generator).int(),
        "block_table": block_ids.int().view(num_reqs, max_num_blocks),
        "block_size": block_size,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Length and block id in, position and slot out."""
    return 24 * len(inputs["seq_lens"])


def flops(inputs: Inputs) -> int:
    return 0


OP = KernelOp(
    name="decode_positions",
    reference=decode_positions,
    make_inputs=make_inputs,
    # Integers are equal or wrong.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
