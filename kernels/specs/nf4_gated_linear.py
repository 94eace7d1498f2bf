"""The gate and up projections of an MLP over weights in NormalFloat4, for few tokens, with the activation after."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.nf4_gated_linear import nf4_gated_linear
from kernels.specs import nf4_linear

_LARGE: dict[str, Any] = {"num_columns": 4096, "intermediate": 14336, "bias": False}
SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096 to 14336": _LARGE | {"num_tokens": 1},
    "16 x 4096 to 14336": _LARGE | {"num_tokens": 16},
    "1 x 576 to 1536": {"num_tokens": 1, "num_columns": 576, "intermediate": 1536, "bias": False},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    num_columns: int = 192,
    intermediate: int = 37,
    block_size: int = 64,
    bias: bool = True,
) -> Inputs:
    """As those of `nf4_linear`."""
    inputs = nf4_linear.make_inputs(
        dtype,
        device,
        seed,
        num_tokens=num_tokens,
        num_columns=num_columns,
        num_rows=2 * intermediate,
        block_size=block_size,
        bias=bias,
    )
    del inputs["residual"]
    return inputs


def bytes_moved(inputs: Inputs) -> int:
    """Everything in once, and one output for two rows of the weight."""
    moved = sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor))
    return moved + len(inputs["x"]) * len(inputs["words"]) // 2 * inputs["x"].element_size()


OP = KernelOp(
    name="nf4_gated_linear",
    reference=nf4_gated_linear,
    make_inputs=make_inputs,
    # fp32 sums in another order; of 16 bits the reference rounds weights and the kernel levels, as far off either way, in both
    # of the factors.
    tolerances={
        torch.float32: Tolerance(2e-5, 2e-5),
        torch.bfloat16: Tolerance(4e-2, 3.2e-2),
        torch.float16: Tolerance(8e-3, 4e-3),
    },
    bytes_moved=bytes_moved,
    flops=nf4_linear.flops,
    shapes=SHAPES,
)
