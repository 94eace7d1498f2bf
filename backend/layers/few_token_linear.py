"""A linear layer that stands alone: of few tokens by the kernel for them, of more by the library's product."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.layers.linear import Linear
from backend.layers.ops import library_linear
from kernels.ops.norm_linear import norm_linear
from kernels.tuning import Shape, load_table


def few_token_linear(linear: Linear, x: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """As `library_linear`, which it gives way to where that was measured to be faster. Rounds to `out_dtype` only."""
    shape = Shape("norm_linear", linear.out_features, linear.in_features)
    tiles = load_table(x.device, x.dtype).choose(shape, x.shape[0])
    if tiles is None:
        return library_linear(linear, x, out_dtype)
    assert linear.weight is not None  # laid out as loaded on CUDA
    return norm_linear(x, linear.weight, bias=linear.bias, out_dtype=out_dtype, tiles=tiles)[0]
