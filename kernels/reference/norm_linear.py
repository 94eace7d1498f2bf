"""A linear layer with the end of the norm before it, the residual sum and the next norm's begin, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.deferred_norm import DeferredNorm
from kernels.reference.projection import project


def norm_linear(
    x: Tensor,
    weight: Tensor,
    square_sums: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, DeferredNorm | None]:
    """Division of a deferred norm, product, bias and residual of one linear layer, and the begin of the next norm.

    `y[t, n] = cast(sum_k x[t, k] * weight[n, k] / rms[t] + bias[n] + residual[t, n])`, in fp32 up to the cast, with
    `rms[t] = sqrt(sum_p square_sums[t, p] / K + eps)`, or 1 without `square_sums`. With `next_norm_weight` also
    `scaled = cast(y * next_norm_weight)` and the sums of squares of y, as a single part.

    Args:
        x: float [num_tokens, K]
        weight: x.dtype [N, K]
        square_sums: float32 [num_tokens, num_parts]: of the x that lacks its norm's division, see `DeferredNorm`; None
            where x needs none
        eps: of the norm, added to the mean square
        bias: x.dtype [N]
        residual: x.dtype [num_tokens, N]
        next_norm_weight: x.dtype [N]: of an RMS norm that follows
        out_dtype: x.dtype by default; float32 for logits
    Returns:
        out_dtype [num_tokens, N], and the deferred norm if one follows. Nothing is mutated.
    """
    total = project(x, weight, square_sums, eps, bias)
    if residual is not None:
        total += residual.float()
    output = total.to(x.dtype if out_dtype is None else out_dtype)
    if next_norm_weight is None:
        return output, None
    return output, DeferredNorm(output * next_norm_weight, output.float().square().sum(dim=1, keepdim=True))
