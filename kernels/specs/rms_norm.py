"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.rms_norm import rms_norm

SHAPES: dict[str, dict[str, Any]] = {
    "decode 64 x 4096": {"num_tokens": 64, "hidden": 4096},
    "prefill 8192 x 4096": {"num_tokens": 8192, "hidden": 4096},
    "prefill 512 x 576": {"num_tokens": 512, "hidden": 576},
}


def make_inputs(
    dtype: torch.dtype, device: torch.device, seed: int = 0, *, num_tokens: int = 5, hidden: int = 123
) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    return {
        "x": torch.randn(num_tokens, hidden, dtype=dtype, device=device, generator=generator),
        "weight": torch.randn(hidden, dtype=dtype, device=device, generator=generator),
        "eps": 1e-5,
    }


def bytes_moved(inputs: Inputs) -> int:
    return 2 * inputs["x"].nbytes + inputs["weight"].nbytes


def flops(inputs: Inputs) -> int:
    """Per element: square and add, times the row's factor, times the weight."""
    return 4 * inputs["x"].numel()


OP = KernelOp(
    name="rms_norm",
    reference=rms_norm,
    make_inputs=make_inputs,
    # Two roundings to the output dtype; fp32 sums in another order.
    tolerances={
        torch.float32: Tolerance(1e-6, 1e-5),
        torch.bfloat16: Tolerance(1e-3, 1.6e-2),
        torch.float16: Tolerance(1e-4, 2e-3),
    },
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
