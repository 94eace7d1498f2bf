"""A uniform draw for each row's next output token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.next_draws import next_draws

SHAPES: dict[str, dict[str, Any]] = {"1": {"num_rows": 1}, "256": {"num_rows": 256}}


def make_inputs(dtype: torch.dtype, device: torch.device, seed: int = 0, *, num_rows: int = 7) -> Inputs:
    """Seeds of all 64 bits. There are no floats in: `dtype` says nothing."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(high: int) -> Tensor:
        return torch.randint(high, (num_rows,), device=device, generator=generator)

    return {"seeds": random(2**62) * 4 + random(4), "positions": random(2**34)}


def bytes_moved(inputs: Inputs) -> int:
    """Seed and position in, draw and position out."""
    return 32 * len(inputs["seeds"])


def flops(inputs: Inputs) -> int:
    return 0


OP = KernelOp(
    name="next_draws",
    reference=next_draws,
    make_inputs=make_inputs,
    # Random bits are equal or wrong.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    mutates=frozenset({"positions"}),
)
