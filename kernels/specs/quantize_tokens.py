"""Activations in 8 bits, each token with a scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.kernel_op import Inputs, KernelOp, Tolerance
from kernels.reference.quantize_tokens import quantize_tokens

SHAPES: dict[str, dict[str, Any]] = {
    "1 x 4096, fp8": {"num_tokens": 1, "num_columns": 4096},
    "64 x 14336, fp8": {"num_tokens": 64, "num_columns": 14336},
    "4096 x 4096, fp8": {"num_tokens": 4096, "num_columns": 4096},
    "4096 x 4096, fp8, one scale": {"num_tokens": 4096, "num_columns": 4096, "per_token": False},
    "4096 x 4096, int8": {"num_tokens": 4096, "num_columns": 4096, "to": torch.int8},
}


def make_inputs(
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    num_tokens: int = 5,
    num_columns: int = 123,
    to: torch.dtype = torch.float8_e4m3fn,
    per_token: bool = True,
) -> Inputs:
    """Tokens of spreads from 0.01 to 100."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(num_tokens, num_columns, device=device, generator=generator)
    spread = torch.logspace(-2, 2, num_tokens, device=device)[:, None]
    return {"x": (x * spread).to(dtype), "dtype": to, "per_token": per_token}


def bytes_moved(inputs: Inputs) -> int:
    """Every value in and a byte out, and a scale for each token."""
    x = inputs["x"]
    return x.nbytes + x.numel() + 4 * len(x)


def flops(inputs: Inputs) -> int:
    """A comparison and a division of each value."""
    return 2 * inputs["x"].numel()


def in_steps(output: Any) -> tuple[Tensor, Tensor]:
    """Codes by their place in their format's order, and of scales 64 times the logarithm: float32, neighbours of bfloat16 are
    less than 1 apart.
    """
    codes, scales = output
    bits = codes.view(torch.int8).int()
    places = bits if codes.dtype == torch.int8 else torch.where(bits < 0, -(bits & 0x7F), bits)
    return places.float(), 64 * scales.log2()


OP = KernelOp(
    name="quantize_tokens",
    reference=quantize_tokens,
    make_inputs=make_inputs,
    # The same operations in the same order.
    tolerances={dtype: Tolerance(0.0, 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    bytes_moved=bytes_moved,
    flops=flops,
    shapes=SHAPES,
)
