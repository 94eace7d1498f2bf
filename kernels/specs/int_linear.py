"""A linear layer over integer codes of 4 or 8 bits with a scale per group of inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.int_linear import int_linear
from kernels.specs.code_inputs import make_codes

_LARGE: dict[str, Any] = {"num_columns": 4096, "group_size": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096 to 28672, int4 g128": _LARGE | {"num_tokens": 1, "num_rows": 28672},
    "16 x 4096 to 28672, int4 g128": _LARGE | {"num_tokens": 16, "num_rows": 28672},
    "32 x 4096 to 28672, int4 g128": _LARGE | {"num_tokens": 32, "num_rows": 28672},
    "64 x 4096 to 28672, int4 g128": _LARGE | {"num_tokens": 64, "num_rows": 28672},
    "1 x 14336 to 4096, int4 g128": _LARGE | {"num_tokens": 1, "num_columns": 14336, "num_rows": 4096},
    "1 x 4096 to 28672, int8": _LARGE | {"num_tokens": 1, "num_rows": 28672, "bits": 8, "group_size": 4096},
    "1 x 576 to 3072, int4 g64": {"num_tokens": 1, "num_columns": 576, "num_rows": 3072, "group_size": 64},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    num_columns: int = 192,
    num_rows: int = 77,
    bits: int = 4,
    group_size: int = 64,
    origin: str = "float",
    bias: bool = False,
    residual: bool = False,
) -> Inputs:
    """Words of random bits; products have a spread of about 1.

    Args:
        origin: "none", "integer" (zero points) or "float" (minimums).
    """
    generator = torch.Generator(device).manual_seed(seed)
    words, grid = make_codes(
        generator, num_rows=num_rows, num_columns=num_columns, bits=bits, group_size=group_size, origin=origin
    )
    return {
        "x": torch.randn(num_tokens, num_columns, dtype=dtype, device=device, generator=generator),
        "words": words,
        "scales": grid.scales,
        "zero_points": grid.zero_points,
        "minimums": grid.minimums,
        "bias": torch.randn(num_rows, dtype=dtype, device=device, generator=generator) if bias else None,
        "residual": torch.randn(num_tokens, num_rows, dtype=dtype, device=device, generator=generator)
        if residual
        else None,
        "bits": bits,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Everything in once, and the output out."""
    moved = sum(value.nbytes for value in inputs.values() if isinstance(value, Tensor))
    return moved + len(inputs["x"]) * len(inputs["words"]) * inputs["x"].element_size()


def flops(inputs: Inputs) -> int:
    """Of the product alone."""
    return 2 * inputs["x"].numel() * len(inputs["words"])


OP = KernelOp(
    name="int_linear",
    reference=int_linear,
    make_inputs=make_inputs,
    # fp32 sums in another order, and weights of 16 bits that the reference rounds and the kernel does not.
    tolerances={
        torch.float32: Tolerance(2e-5, 1e-5),
        torch.bfloat16: Tolerance(2e-2, 1.6e-2),
        torch.float16: Tolerance(2e-3, 2e-3),
    },
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
