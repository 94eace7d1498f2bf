"""A linear layer over int8 weights and activations with scales, in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.byte_launch import check_layer
from kernels.ops.byte_linear import multiply_scaled
from kernels.ops.projection import Tiles
from kernels.ops.quantize_tokens import quantize_tokens
from kernels.reference.token_codes import TokenCodes


def int8_linear(
    x: Tensor | TokenCodes,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    output: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """`y = x W^T + b + r` with `W[n, k] = q[n, k] * s[n]` and x rounded by `quantize_tokens`.

    Sums are exact, in an int32, which holds 131,071 products of any two codes; then they are scaled in fp32.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1), K at most 65,536; or what
            `quantize_tokens` gave of it
        codes: int8 [N, K], strides (any, 1)
        scales: float32 [N, 1], contiguous
        bias: x.dtype [N], stride (1,)
        residual: x.dtype [num_tokens, N], strides (any, 1)
        output: where to write, x.dtype [num_tokens, N], strides (any, 1); may be `residual`; a new tensor by default
        tiles: how to cut the product, see `multiply_scaled`; by default chosen from the sizes
    Returns:
        x.dtype [num_tokens, N]. Nothing but `output` is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    output = check_layer(x, codes, scales, torch.int8, bias, residual, output)
    if output.numel() == 0:
        return output
    x_codes, x_scales = x[:2] if isinstance(x, TokenCodes) else quantize_tokens(x, torch.int8)
    return multiply_scaled(x_codes, x_scales, codes, scales, bias, residual, output, tiles)
