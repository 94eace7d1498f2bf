"""The gated activation of a Llama MLP, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate the right half of each row by the SiLU of its left half.

    `y[t, i] = silu(x[t, i]) * x[t, I + i]` with `silu(a) = a * sigmoid(a)`; after Shazeer, "GLU Variants Improve
    Transformer" (2020).

    Args:
        x: float [num_tokens, 2 * I], the gate and the up projection side by side
    Returns:
        x.dtype [num_tokens, I]; nothing is mutated.
    """
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
