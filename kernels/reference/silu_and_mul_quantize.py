"""The gated activation of a Llama MLP with its result in 8 bits, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.quantize_tokens import quantize_tokens
from kernels.reference.silu_and_mul import silu_and_mul


def silu_and_mul_quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_tokens` of what `silu_and_mul` gives, which is rounded to x.dtype in between.

    Args:
        x: float [num_tokens, 2 * I], the gate and the up projection side by side.
        dtype: float8_e4m3fn or int8.
    Returns:
        codes: dtype [num_tokens, I].
        scales: float32 [num_tokens, 1].
    """
    return quantize_tokens(silu_and_mul(x), dtype)
