"""A linear layer for few tokens, with the norm before it, the residual sum and the norm after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.deferred_norm import DeferredNorm
from kernels.reference.norm_linear import norm_linear
from kernels.specs.linear_inputs import linear_input_bytes, make_linear_inputs, product_flops

# As a decoder calls it: within layers nothing is left of the norm before, and the next one begins here.
_IN_LAYER: dict[str, Any] = {"num_parts": 0, "bias": False}
_HEAD: dict[str, Any] = _IN_LAYER | {"residual": False, "next_norm": False, "out_dtype": torch.float32}
SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096 to 4096": _IN_LAYER | {"num_tokens": 1, "num_columns": 4096, "num_rows": 4096},
    "1 x 14336 to 4096": _IN_LAYER | {"num_tokens": 1, "num_columns": 14336, "num_rows": 4096},
    "16 x 14336 to 4096": _IN_LAYER | {"num_tokens": 16, "num_columns": 14336, "num_rows": 4096},
    "1 x 4096 to 128256 logits": _HEAD | {"num_tokens": 1, "num_columns": 4096, "num_rows": 128_256},
    "8 x 576 to 576": _IN_LAYER | {"num_tokens": 8, "num_columns": 576, "num_rows": 576},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    num_columns: int = 123,
    num_rows: int = 77,
    num_parts: int = 3,
    bias: bool = True,
    residual: bool = True,
    next_norm: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Inputs:
    """Args:
    num_parts: of the sums of squares of the norm before; 0 for an x that lacks no division.
    """
    generator = torch.Generator(device).manual_seed(seed)
    inputs = make_linear_inputs(
        dtype,
        generator,
        num_tokens=num_tokens,
        num_columns=num_columns,
        num_rows=num_rows,
        num_parts=num_parts,
        bias=bias,
    )

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    return inputs | {
        "residual": random(num_tokens, num_rows) if residual else None,
        "next_norm_weight": 1 + 0.2 * random(num_rows) if next_norm else None,
        "out_dtype": out_dtype,
    }


def comparable(output: tuple[Tensor, DeferredNorm | None]) -> tuple[Tensor, ...]:
    """The sums of squares have as many parts as an implementation likes: only their sum means something."""
    y, deferred = output
    return (y,) if deferred is None else (y, deferred.scaled, deferred.square_sums.sum(dim=1))


def bytes_moved(inputs: Inputs) -> int:
    """Everything in and the output out; with a next norm that scaled too, and a sum of squares per token."""
    num_tokens, num_rows = len(inputs["x"]), len(inputs["weight"])
    moved = linear_input_bytes(inputs)
    moved += num_tokens * num_rows * (inputs["out_dtype"] or inputs["x"].dtype).itemsize
    if inputs["residual"] is not None:
        moved += inputs["residual"].nbytes
    if inputs["next_norm_weight"] is not None:
        moved += inputs["next_norm_weight"].nbytes + num_tokens * num_rows * inputs["x"].element_size() + 4 * num_tokens
    return moved


OP = KernelOp(
    name="norm_linear",
    reference=norm_linear,
    make_inputs=make_inputs,
    # fp32 sums in another order, and so two values that are rounded to neighbours; the next norm rounds once more.
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5),
        torch.bfloat16: Tolerance(1e-3, 1.6e-2),
        torch.float16: Tolerance(1e-4, 2e-3),
    },
    bytes_moved=bytes_moved,
    flops=product_flops,
    shapes=SHAPES,
    comparable=comparable,
)
