"""Inputs of a linear layer behind a deferred norm, which several ops take."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.kernel_op import Inputs
from kernels.specs.code_inputs import make_codes


def make_linear_inputs(
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    num_tokens: int,
    num_columns: int,
    num_rows: int,
    num_parts: int,
    bias: bool,
    bits: int = 0,
    group_size: int = 0,
    origin: str = "none",
) -> Inputs:
    """`x`, `weight`, `square_sums`, `eps` and `bias`, and with bits `code_grid`; products have a spread of about 1.

    Args:
        num_parts: of the sums of squares; 0 for an x that lacks no division.
        bits: of the codes that the weight is made of; 0 for a matrix.
        group_size, origin: of the codes, see `make_codes`.
    """
    device = generator.device
    hidden = torch.randn(num_tokens, num_columns, dtype=dtype, device=device, generator=generator)
    inputs: Inputs = {"x": hidden}
    if bits:
        inputs["weight"], inputs["code_grid"] = make_codes(
            generator, num_rows=num_rows, num_columns=num_columns, bits=bits, group_size=group_size, origin=origin
        )
    else:
        weight = torch.randn(num_rows, num_columns, dtype=dtype, device=device, generator=generator)
        inputs["weight"] = weight.mul_(num_columns**-0.5)
    inputs |= {
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
    tensors = [*(inputs[name] for name in ("x", "weight", "square_sums", "bias")), *(inputs.get("code_grid") or ())]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def product_flops(inputs: Inputs) -> int:
    return 2 * inputs["x"].numel() * len(inputs["weight"])
