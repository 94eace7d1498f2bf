"""The gate and up projections of an MLP over weights and tokens in 8 bits, for few tokens, with the activation after."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.byte_gated_linear import byte_gated_linear
from kernels.reference.quantize_tokens import quantize_tokens
from kernels.reference.token_codes import TokenCodes
from kernels.specs.byte_inputs import make_byte_inputs

_LARGE: dict[str, Any] = {"num_columns": 4096, "intermediate": 14336}
SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096 to 14336, fp8": _LARGE | {"num_tokens": 1},
    "16 x 4096 to 14336, fp8": _LARGE | {"num_tokens": 16},
    "1 x 4096 to 14336, int8": _LARGE | {"num_tokens": 1, "to": torch.int8},
    "1 x 576 to 1536, fp8": {"num_tokens": 1, "num_columns": 576, "intermediate": 1536},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    num_columns: int = 208,
    intermediate: int = 37,
    bias: bool = True,
    to: torch.dtype = torch.float8_e4m3fn,
) -> Inputs:
    """Products have a spread of about 1."""
    weight, inputs = make_byte_inputs(
        dtype,
        torch.Generator(device).manual_seed(seed),
        num_tokens=num_tokens,
        num_columns=num_columns,
        num_rows=2 * intermediate,
        bias=bias,
        residual=False,
    )
    x = TokenCodes(*quantize_tokens(inputs["x"], to), dtype)
    codes, scales = quantize_tokens(weight, to)
    return {"x": x, "codes": codes, "scales": scales, "bias": inputs["bias"]}


def bytes_moved(inputs: Inputs) -> int:
    """Everything in once, and one output for two rows of the weight."""
    x, codes, scales, bias = (inputs[name] for name in ("x", "codes", "scales", "bias"))
    moved = sum(tensor.nbytes for tensor in (x.codes, x.scales, codes, scales, bias) if tensor is not None)
    return moved + len(x.codes) * len(codes) // 2 * x.dtype.itemsize


def flops(inputs: Inputs) -> int:
    """Of the product alone."""
    return 2 * inputs["x"].codes.numel() * len(inputs["codes"])


OP = KernelOp(
    name="byte_gated_linear",
    reference=byte_gated_linear,
    make_inputs=make_inputs,
    # fp32 sums in another order, of which a matrix unit keeps a few bits less, and so two values that are rounded to neighbours.
    tolerances={
        torch.float32: Tolerance(1e-4, 1e-4),
        torch.bfloat16: Tolerance(1e-3, 1.6e-2),
        torch.float16: Tolerance(1e-4, 2e-3),
    },
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
