"""The gate and up projections of an MLP over weights and tokens in 8 bits, and SiLU-and-multiply, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.int8_linear import multiply_int8
from kernels.reference.silu_and_mul import silu_and_mul
from kernels.reference.token_codes import TokenCodes


def byte_gated_linear(x: TokenCodes, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`silu_and_mul` of the product with its bias, in float32, rounded once to x.dtype.

    Args:
        x: num_tokens of K codes.
        codes: x.codes' dtype, float8_e4m3fn or int8 [2 * I, K]: the gate's rows, then the up projection's.
        scales: float32 [2 * I, 1], `w = code * scale`.
        bias: x.dtype [2 * I].
    Returns:
        x.dtype [num_tokens, I].
    """
    is_int8 = codes.dtype == torch.int8
    sums = multiply_int8(x.codes, codes) if is_int8 else x.codes.float() @ codes.float().t()
    gate_up = sums * x.scales * scales.t()
    return silu_and_mul(gate_up if bias is None else gate_up + bias.float()).to(x.dtype)
