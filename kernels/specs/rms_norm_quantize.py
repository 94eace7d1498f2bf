"""Root-mean-square normalisation with its result in 8 bits."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.rms_norm_quantize import rms_norm_quantize
from kernels.specs import rms_norm
from kernels.specs.quantize_tokens import in_steps

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096, fp8": {"num_tokens": 1, "hidden": 4096},
    "64 x 4096, fp8": {"num_tokens": 64, "hidden": 4096},
    "64 x 4096, int8": {"num_tokens": 64, "hidden": 4096, "to": torch.int8},
    "8192 x 4096, fp8": {"num_tokens": 8192, "hidden": 4096},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    hidden: int = 123,
    to: torch.dtype = torch.float8_e4m3fn,
) -> Inputs:
    return rms_norm.make_inputs(dtype, device, seed, num_tokens=num_tokens, hidden=hidden) | {"dtype": to}


def bytes_moved(inputs: Inputs) -> int:
    """Every value and the weight in, a byte out, and a scale for each token."""
    x = inputs["x"]
    return x.nbytes + inputs["weight"].nbytes + x.numel() + 4 * len(x)


def flops(inputs: Inputs) -> int:
    """Per element: square and add, times the row's factor, times the weight; a comparison and a division."""
    return 6 * inputs["x"].numel()


OP = KernelOp(
    name="rms_norm_quantize",
    reference=rms_norm_quantize,
    make_inputs=make_inputs,
    # A sum in another order moves values to their neighbours, which are a step apart in bfloat16 at most; so may be scales.
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
