"""A linear layer over int8 weights and activations, each output channel and each token with a scale."""

from __future__ import annotations

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.int8_linear import int8_linear, quantize_rows_int8
from kernels.specs.byte_inputs import SHAPES, bytes_moved, flops, make_byte_inputs


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    num_columns: int = 208,
    num_rows: int = 77,
    bias: bool = False,
    residual: bool = False,
) -> Inputs:
    """Products have a spread of about 1."""
    weight, inputs = make_byte_inputs(
        dtype,
        torch.Generator(device).manual_seed(seed),
        num_tokens=num_tokens,
        num_columns=num_columns,
        num_rows=num_rows,
        bias=bias,
        residual=residual,
    )
    codes, scales = quantize_rows_int8(weight)
    return inputs | {"codes": codes, "scales": scales}


OP = KernelOp(
    name="int8_linear",
    reference=int8_linear,
    make_inputs=make_inputs,
    # Sums are exact; a scale's product and a sum may be one operation, and two values so be rounded to neighbours.
    tolerances={
        torch.float32: Tolerance(1e-6, 1e-6),
        torch.bfloat16: Tolerance(1e-3, 8e-3),
        torch.float16: Tolerance(1e-4, 1e-3),
    },
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    has_byte_codes=True,
)
