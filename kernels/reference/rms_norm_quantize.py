"""Root-mean-square normalisation with its result in 8 bits, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.quantize_tokens import quantize_tokens
from kernels.reference.rms_norm import rms_norm


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_tokens` of what `rms_norm` gives, which is rounded to x.dtype in between.

    Args:
        x: float [num_tokens, hidden].
        weight: x.dtype [hidden].
        eps: added to the mean square.
        dtype: float8_e4m3fn or int8.
    Returns:
        codes: dtype [num_tokens, hidden].
        scales: float32 [num_tokens, 1].
    """
    return quantize_tokens(rms_norm(x, weight, eps), dtype)
