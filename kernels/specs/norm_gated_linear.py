"""The gate and up projections of an MLP for few tokens, with the norm before and the activation after."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.norm_gated_linear import norm_gated_linear
from kernels.specs.linear_inputs import linear_input_bytes, make_linear_inputs, product_flops

_LARGE: dict[str, Any] = {"num_columns": 4096, "intermediate": 14336, "num_parts": 64, "bias": False}
_CODES: dict[str, Any] = {"num_parts": 0, "bits": 4, "group_size": 128, "origin": "float"}
SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096 to 14336": _LARGE | {"num_tokens": 1},
    "16 x 4096 to 14336": _LARGE | {"num_tokens": 16},
    "64 x 4096 to 14336": _LARGE | {"num_tokens": 64},
    "1 x 4096 to 14336, int4 g128": _LARGE | _CODES | {"num_tokens": 1},
    "8 x 576 to 1536": {"num_tokens": 8, "num_columns": 576, "intermediate": 1536, "num_parts": 18, "bias": False},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    num_columns: int = 123,
    intermediate: int = 37,
    num_parts: int = 3,
    bias: bool = True,
    bits: int = 0,
    group_size: int = 0,
    origin: str = "none",
) -> Inputs:
    """Args:
    num_parts: of the sums of squares of the norm before; 0 for an x that lacks no division.
    bits, group_size, origin: of a weight of codes, see `make_linear_inputs`; those go with num_parts = 0.
    """
    return {"code_grid": None} | make_linear_inputs(
        dtype,
        torch.Generator(device).manual_seed(seed),
        num_tokens=num_tokens,
        num_columns=num_columns,
        num_rows=2 * intermediate,
        num_parts=num_parts,
        bias=bias,
        bits=bits,
        group_size=group_size,
        origin=origin,
    )


def bytes_moved(inputs: Inputs) -> int:
    """Everything in, and one output for two rows of the weight."""
    x = inputs["x"]
    return linear_input_bytes(inputs) + len(x) * len(inputs["weight"]) // 2 * x.element_size()


OP = KernelOp(
    name="norm_gated_linear",
    reference=norm_gated_linear,
    make_inputs=make_inputs,
    # fp32 sums in another order, and so two values that are rounded to neighbours.
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5),
        torch.bfloat16: Tolerance(1e-3, 1.6e-2),
        torch.float16: Tolerance(1e-4, 2e-3),
    },
    bytes_moved=bytes_moved,
    flops=product_flops,
    shapes=SHAPES,
)
