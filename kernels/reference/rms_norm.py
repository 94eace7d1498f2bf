"""Root-mean-square normalisation, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square, then scale each column.

    `y[t, i] = cast(x[t, i] / sqrt(mean_j(x[t, j]^2) + eps)) * weight[i]`, after Zhang and Sennrich, "Root Mean Square
    Layer Normalization" (2019). The division is in fp32; the cast to `x.dtype` comes before the product with `weight`,
    as in Hugging Face's Llama, so that bfloat16 models round where their authors' did.

    Args:
        x: float [num_tokens, hidden]
        weight: x.dtype [hidden]
        eps: added to the mean square
    Returns:
        x.dtype [num_tokens, hidden]; nothing is mutated.
    """
    normalized = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), None, eps)
    return normalized.to(x.dtype) * weight
