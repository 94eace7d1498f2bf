"""A linear layer over weights and activations in float8_e4m3fn with scales, in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.byte_launch import ROW_BYTES, check_layer
from kernels.ops.byte_linear import multiply_scaled
from kernels.ops.projection import Tiles, supports_tma
from kernels.ops.quantize_tokens import quantize_tokens
from kernels.reference.token_codes import TokenCodes

# Above, products bound a layer on an H200 rather than its weight's bytes: at 4.3 TB/s and about 1,000 TFLOP/s, 2 FLOPs a
# token take as long as a byte at 116 tokens. The library's pipelines are then ahead.
MAX_TOKENS = 128


def fp8_linear(
    x: Tensor | TokenCodes,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    per_token: bool = True,
    *,
    output: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """`y = x W^T + b + r` with `W[n, k] = q[n, k] * s[n]` and x rounded by `quantize_tokens`.

    Codes are multiplied exactly, summed in fp32, and scaled. Above 128 tokens the library does so where it can, in bfloat16 on
    Hopper, and bias and residual are added to what it rounds.

    Args:
        x: float32, bfloat16 or float16 [num_tokens, K], strides (any, 1), K at most 65,536; or what
            `quantize_tokens` gave of it, whatever `per_token`
        codes: float8_e4m3fn [N, K], strides (any, 1)
        scales: float32 [N, 1], contiguous
        bias: x.dtype [N], stride (1,)
        residual: x.dtype [num_tokens, N], strides (any, 1)
        per_token: whether activations have a scale per token, or else one for all
        output: where to write, x.dtype [num_tokens, N], strides (any, 1); may be `residual`; a new tensor by default
        tiles: how to cut the product, see `multiply_scaled`; by default chosen from the sizes
    Returns:
        x.dtype [num_tokens, N]. Nothing but `output` is mutated.
    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
    """
    output = check_layer(x, codes, scales, torch.float8_e4m3fn, bias, residual, output)
    if output.numel() == 0:
        return output
    dtype = x.dtype
    x_codes, x_scales = x[:2] if isinstance(x, TokenCodes) else quantize_tokens(x, torch.float8_e4m3fn, per_token)
    if tiles is None and _is_for_library(len(x_codes), dtype, codes):
        is_whole = residual is None and output.is_contiguous()
        product = output if is_whole else torch.empty(output.shape, dtype=dtype, device=output.device)
        torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            x_codes, codes.t(), x_scales, scales.t(), out_dtype=dtype, out=product
        )
        if bias is not None:
            product.add_(bias)
        if residual is not None:
            torch.add(product, residual, out=output)
        elif not is_whole:
            output.copy_(product)
        return output
    return multiply_scaled(x_codes, x_scales, codes, scales, bias, residual, output, tiles)


def _is_for_library(num_tokens: int, dtype: torch.dtype, codes: Tensor) -> bool:
    return (
        num_tokens > MAX_TOKENS
        and dtype == torch.bfloat16
        and supports_tma(codes.device)
        and all(size % ROW_BYTES == 0 for size in (*codes.shape, codes.stride(0)))
    )
