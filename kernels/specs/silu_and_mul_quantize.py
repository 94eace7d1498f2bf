"""The gated activation of a Llama MLP with its result in 8 bits."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.silu_and_mul_quantize import silu_and_mul_quantize
from kernels.specs import silu_and_mul
from kernels.specs.quantize_tokens import in_steps

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 14336, fp8": {"num_tokens": 1, "intermediate": 14336},
    "64 x 14336, fp8": {"num_tokens": 64, "intermediate": 14336},
    "64 x 14336, int8": {"num_tokens": 64, "intermediate": 14336, "to": torch.int8},
    "8192 x 14336, fp8": {"num_tokens": 8192, "intermediate": 14336},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    intermediate: int = 123,
    to: torch.dtype = torch.float8_e4m3fn,
) -> Inputs:
    inputs = silu_and_mul.make_inputs(dtype, device, seed, num_tokens=num_tokens, intermediate=intermediate)
    return inputs | {"dtype": to}


def bytes_moved(inputs: Inputs) -> int:
    """Both halves in, a byte of each output out, and a scale for each token."""
    x = inputs["x"]
    return x.nbytes + x.numel() // 2 + 4 * len(x)


def flops(inputs: Inputs) -> int:
    """Per output: negate, exponentiate, add, divide, multiply; a comparison and a division."""
    return 7 * inputs["x"].numel() // 2


OP = KernelOp(
    name="silu_and_mul_quantize",
    reference=silu_and_mul_quantize,
    make_inputs=make_inputs,
    # Another exponential moves values to their neighbours, which are a step apart in bfloat16 at most; so may be scales.
    tolerances={
        torch.float32: Tolerance(1.0, 0.0),
        torch.bfloat16: Tolerance(2.0, 0.0),
        torch.float16: Tolerance(1.0, 0.0),
    },
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    comparable=in_steps,
)
