"""Activations in 8 bits, each token with a scale: what a product with a weight of as many bits takes."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.fp8_linear import quantize_fp8
from kernels.reference.int8_linear import quantize_tokens_int8


def quantize_tokens(x: Tensor, dtype: torch.dtype, per_token: bool = True) -> tuple[Tensor, Tensor]:
    """`x[t, k] = codes[t, k] * scales[t]`, to the nearest code, halves to even, as `quantize_fp8` and `quantize_tokens_int8`.

    Args:
        x: float [num_tokens, num_columns].
        dtype: float8_e4m3fn or int8.
        per_token: otherwise one scale for all tokens, of float8_e4m3fn alone.
    Returns:
        codes: dtype [num_tokens, num_columns].
        scales: float32 [num_tokens, 1].
    """
    return quantize_tokens_int8(x) if dtype == torch.int8 else quantize_fp8(x, per_row=per_token)
