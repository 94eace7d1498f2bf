"""A linear layer over int8 weights and activations, each output channel and each token with a scale: integers multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.token_codes import TokenCodes

LARGEST_CODE = 127.0
LEAST_TOKEN_CODE = -128.0
TOKEN_REACH = (LARGEST_CODE - LEAST_TOKEN_CODE) / 2  # the steps from 0 to a token's largest magnitude
# 128 x 128 summed this often is the last that an int32 holds.
MAX_INT32_INPUTS = (2**31 - 1) // 128**2


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of a weight to 255 codes around 0, its largest magnitude being one.

    A row of zeros has scale 0 and gives zeros. A row with an infinity or a NaN has a NaN for its scale: it stays visible,
    and in that row alone.

    Args:
        x: float [rows, columns].
    Returns:
        codes: int8 [rows, columns], -127 to 127, halves to even.
        scales: float32 [rows, 1], `x = code * scale`.
    """
    return _round_rows(x, LARGEST_CODE, -LARGEST_CODE)


def quantize_tokens_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each token to all 256 codes, its largest magnitude lying half a step beyond 127: `scale = max |x| / 127.5`.

    So compressed-tensors (0.20) rounds the activations of a checkpoint that asks for it. Zeros and what is not finite as in
    `quantize_rows_int8`.

    Args:
        x: float [num_tokens, columns].
    Returns:
        codes: int8 [num_tokens, columns], -128 to 127, halves to even.
        scales: float32 [num_tokens, 1], `x = code * scale`.
    """
    return _round_rows(x, TOKEN_REACH, LEAST_TOKEN_CODE)


def _round_rows(x: Tensor, reach: float, least: float) -> tuple[Tensor, Tensor]:
    """Codes from `least` to 127, and scales; `reach` of these are a row's largest magnitude."""
    wide = x.float()
    finite = wide.isfinite().all(dim=1, keepdim=True)
    wide = wide.where(finite, 0.0)
    largest = wide.abs().amax(dim=1, keepdim=True)
    # By a tensor: by a number, CUDA multiplies with what is 1 over it when rounded.
    scales = largest / torch.full_like(largest, reach)
    # Of a scale that rounds to 0 nothing is left; one below float32's normal numbers is so coarse that codes may pass `reach`.
    codes = torch.where(scales > 0, wide / scales, 0.0).round().clamp(least, LARGEST_CODE)
    return codes.to(torch.int8), scales.where(finite, torch.nan)


def multiply_int8(x: Tensor, weight: Tensor) -> Tensor:
    """The exact integers `x W^T` as float32 rounds them.

    Args:
        x: int8 [num_tokens, in_features].
        weight: int8 [out_features, in_features].
    Returns:
        float32 [num_tokens, out_features].
    """
    if x.device.type == "cpu" and x.shape[1] <= MAX_INT32_INPUTS:
        return torch.ops.aten._int_mm(x, weight.t()).float()
    # CUDA's product takes certain shapes only. float64 holds every sum of up to 2^39 inputs.
    return (x.double() @ weight.double().t()).float()


def int8_linear(
    x: Tensor | TokenCodes,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`y = x W^T + b + r`, float [num_tokens, in_features] -> [num_tokens, out_features] in x's dtype.

    Activations are rounded as they come, each token by itself (`quantize_tokens_int8`), or were before; sums are exact
    integers, and scales, bias and residual follow in float32.

    Args:
        codes: int8 [out_features, in_features].
        scales: float32 [out_features, 1], `w = code * scale`.
        bias: float [out_features].
        residual: float [num_tokens, out_features].
    """
    y = scaled_int8_product(x, codes, scales)
    for term in (bias, residual):
        y = y if term is None else y + term.float()
    return y.to(x.dtype)


def scaled_int8_product(x: Tensor | TokenCodes, codes: Tensor, scales: Tensor) -> Tensor:
    """`int8_linear` without a bias, float32 [num_tokens, out_features]."""
    x_codes, x_scales = x[:2] if isinstance(x, TokenCodes) else quantize_tokens_int8(x)
    return multiply_int8(x_codes, codes) * x_scales * scales.t()


def dequantize_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [out_features, in_features] of what `quantize_rows_int8` gave of a weight."""
    return codes.float() * scales
