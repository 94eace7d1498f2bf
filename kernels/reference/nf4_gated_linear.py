"""The gate and up projections of an MLP over weights in NormalFloat4, and SiLU-and-multiply, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.nf4_linear import dequantize_nf4
from kernels.reference.nf4_words import from_nf4_chunks
from kernels.reference.silu_and_mul import silu_and_mul


def nf4_gated_linear(
    x: Tensor, words: Tensor, codes: Tensor, steps: Tensor, means: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`silu_and_mul` of the product with its bias, in float32, rounded once to x.dtype.

    The weight is rounded to x's dtype, as tensor cores take it.

    Args: as `nf4_linear`; the gate's rows, then the up projection's.
    Returns:
        x.dtype [num_tokens, I].
    """
    weight = dequantize_nf4(from_nf4_chunks(words, x.shape[1]), codes, steps, means, x.shape[1])
    gate_up = torch.mm(x.float(), weight.to(x.dtype).float().t())
    return silu_and_mul(gate_up if bias is None else gate_up + bias.float()).to(x.dtype)
