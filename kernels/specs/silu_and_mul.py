"""The gated activation of a Llama MLP."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.silu_and_mul import silu_and_mul

SHAPES: dict[str, dict[str, Any]] = {
    "decode 1 x 14336": {"num_tokens": 1, "intermediate": 14336},
    "decode 64 x 14336": {"num_tokens": 64, "intermediate": 14336},
    "prefill 8192 x 14336": {"num_tokens": 8192, "intermediate": 14336},
    "prefill 512 x 1536": {"num_tokens": 512, "intermediate": 1536},
}


def make_inputs(
    dtype: torch.dtype, device: torch.device, seed: int = 0, *, num_tokens: int = 5, intermediate: int = 123
) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    return {"x": 3 * torch.randn(num_tokens, 2 * intermediate, dtype=dtype, device=device, generator=generator)}


def bytes_moved(inputs: Inputs) -> int:
    """Both halves in, one out."""
    return inputs["x"].nbytes * 3 // 2


def flops(inputs: Inputs) -> int:
    """Per output: negate, exponentiate, add, divide, multiply."""
    return 5 * inputs["x"].numel() // 2


OP = KernelOp(
    name="silu_and_mul",
    reference=silu_and_mul,
    make_inputs=make_inputs,
    # Two roundings to the output dtype; another exponential in fp32.
    tolerances={
        torch.float32: Tolerance(1e-6, 1e-5),
        torch.bfloat16: Tolerance(1e-3, 1.6e-2),
        torch.float16: Tolerance(1e-4, 2e-3),
    },
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
