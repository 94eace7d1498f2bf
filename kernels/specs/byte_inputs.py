"""Inputs of a linear layer whose weights and activations are in 8 bits, which two ops take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs

_LARGE: dict[str, Any] = {"num_columns": 4096, "num_rows": 28672}
SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096 to 28672": _LARGE | {"num_tokens": 1},
    "16 x 4096 to 28672": _LARGE | {"num_tokens": 16},
    "64 x 4096 to 28672": _LARGE | {"num_tokens": 64},
    "2048 x 4096 to 28672": _LARGE | {"num_tokens": 2048},
    "1 x 14336 to 4096": {"num_tokens": 1, "num_columns": 14336, "num_rows": 4096},
    "64 x 14336 to 4096": {"num_tokens": 64, "num_columns": 14336, "num_rows": 4096},
    "1 x 576 to 3072": {"num_tokens": 1, "num_columns": 576, "num_rows": 3072},
}


def make_byte_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    num_tokens: int,
    num_columns: int,
    num_rows: int,
    bias: bool,
    residual: bool,
) -> tuple[Tensor, Inputs]:
    """A weight, float32, of which codes and scales are to be made, and the other inputs; products have a spread of about 1."""
    device = generator.device

    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=of, device=device, generator=generator)

    x = random(num_tokens, num_columns)
    weight = random(num_rows, num_columns, of=torch.float32).mul_(num_columns**-0.5)
    return weight, {
        "x": x,
        "bias": random(num_rows) if bias else None,
        "residual": random(num_tokens, num_rows) if residual else None,
    }


def bytes_moved(inputs: Inputs) -> int:
    """Everything in once, and the output out."""
    moved = sum(value.nbytes for value in inputs.values() if isinstance(value, Tensor))
    return moved + len(inputs["x"]) * len(inputs["codes"]) * inputs["x"].element_size()


def flops(inputs: Inputs) -> int:
    """Of the product alone."""
    return 2 * inputs["x"].numel() * len(inputs["codes"])
