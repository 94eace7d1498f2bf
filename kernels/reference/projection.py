"""What the linear references share: a product in fp32 that ends the norm before it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.code_grid import CodeGrid


def project(
    x: Tensor,
    weight: Tensor,
    square_sums: Tensor | None,
    eps: float,
    bias: Tensor | None,
    code_grid: CodeGrid | None = None,
) -> Tensor:
    """`y[t, n] = sum_k x[t, k] * weight[n, k] / rms[t] + bias[n]`, rounded nowhere.

    `rms[t] = sqrt(sum_p square_sums[t, p] / K + eps)`, or 1 without `square_sums`.

    Args:
        x: float [num_tokens, K]
        weight: x.dtype [N, K]
        square_sums: float32 [num_tokens, num_parts]
        bias: x.dtype [N]
        code_grid: makes the weight one of codes, int32 as `CodeGrid` says
    Returns:
        float32 [num_tokens, N].
    """
    matrix = weight.float() if code_grid is None else code_grid.dequantize(weight, x.shape[1])
    product = torch.mm(x.float(), matrix.t())
    if square_sums is not None:
        product /= (square_sums.sum(dim=1, keepdim=True) / x.shape[1] + eps).sqrt()
    if bias is not None:
        product += bias.float()
    return product
