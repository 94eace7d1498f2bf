"""Inputs of a linear layer behind a deferred norm, which several ops take."""

from __future__ import annotations

import torch

from kernels.kernel_op import Inputs


def make_linear_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    num_tokens: int,
    num_columns: int,
    num_rows: int,
    num_parts: int,
    bias: bool,
) -> Inputs:
    """`x`, `weight`, `square_sums`, `eps` and `bias`; products have a spread of about 1.

    Args:
        num_parts: of the sums of squares; 0 for an x that lacks no division.
    """
    device = generator.device
    hidden = torch.randn(num_tokens, num_columns, dtype=dtype, device=device, generator=generator)
    weight = torch.randn(num_rows, num_columns, dtype=dtype, device=device, generator=generator)
    inputs: Inputs = {
        "x": hidden,
        "weight": weight.mul_(num_columns**-0.5),
        "square_sums": None,
        "eps": 1e-5,
        "bias": torch.randn(num_rows, dtype=dtype, device=device, generator=generator) if bias else None,
    }
    if num_parts:
        norm_weight = 1 + 0.2 * torch.randn(num_columns, dtype=dtype, device=device, generator=generator)
        hidden = 3 * hidden
        squares = hidden.float().square().tensor_split(num_parts, dim=1)
        sums = torch.stack([part.sum(dim=1) for part in squares], dim=1)
        inputs |= {"x": hidden * norm_weight, "square_sums": sums}
    return inputs


def linear_input_bytes(inputs: Inputs) -> int:
    return sum(inputs[name].nbytes for name in ("x", "weight", "square_sums", "bias") if inputs[name] is not None)


def product_flops(inputs: Inputs) -> int:
    return 2 * len(inputs["x"]) * inputs["weight"].numel()
