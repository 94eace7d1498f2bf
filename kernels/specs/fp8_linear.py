"""A linear layer over weights and activations in float8_e4m3fn with scales."""

from __future__ import annotations

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.fp8_linear import fp8_linear, quantize_fp8
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
    per_token: bool = True,
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
    codes, scales = quantize_fp8(weight, per_row=True)
    return inputs | {"codes": codes, "scales": scales, "per_token": per_token}


OP = KernelOp(
    name="fp8_linear",
    reference=fp8_linear,
    make_inputs=make_inputs,
    # Sums in another order, which a matrix unit keeps 14 bits of over 128 columns; the library rounds before bias and residual.
    tolerances={
        torch.float32: Tolerance(4e-3, 1e-3),
        torch.bfloat16: Tolerance(2e-2, 1.6e-2),
        torch.float16: Tolerance(4e-3, 2e-3),
    },
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
    has_byte_codes=True,
)
