"""A linear layer over weights and activations in float8_e4m3fn, 4 significant bits and at most 448, with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.token_codes import TokenCodes

LARGEST = 448.0


def cast_fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    """float8_e4m3fn codes of `x / scale`, nearest, halves to even.

    Finite values saturate at `448 * scale`: the format has no infinity, and a plain cast makes NaN of what is larger on some
    devices. Infinities and NaN become NaN, so that they stay visible. `count_saturated` says how many saturate.

    Args:
        x: float, any shape.
        scale: float32, broadcast against x; 0 where all of x is 0, or rounds to it.
    """
    codes = _divided(x, scale).clamp(-LARGEST, LARGEST)
    return codes.where(x.isfinite(), torch.nan).to(torch.float8_e4m3fn)


def count_saturated(x: Tensor, scale: Tensor | float) -> int:
    """How many finite values `cast_fp8` moves to `448 * scale` that rounding alone would not, as it would up to 464."""
    return int(((_divided(x, scale).abs() > 464.0) & x.isfinite()).sum())


def quantize_fp8(x: Tensor, *, per_row: bool) -> tuple[Tensor, Tensor]:
    """Scales that just hold the largest finite value of a row, or of all, and the codes.

    Args:
        x: float [rows, columns], neither of them 0 unless per_row.
    Returns:
        codes: float8_e4m3fn [rows, columns].
        scales: float32 [rows, 1], equal in all rows unless per_row; `x = code * scale`.
    """
    wide = x.float()
    magnitudes = wide.abs().where(wide.isfinite(), 0.0)
    largest = magnitudes.amax(dim=1, keepdim=True) if per_row else magnitudes.amax().expand(x.shape[0], 1)
    # By a tensor: by a number, CUDA multiplies with what is 1 over it when rounded.
    scales = largest.contiguous() / torch.full_like(largest, LARGEST)
    return cast_fp8(wide, scales), scales


def fp8_linear(
    x: Tensor | TokenCodes,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    per_token: bool = True,
) -> Tensor:
    """`y = x W^T + b + r`, float [num_tokens, in_features] -> [num_tokens, out_features] in x's dtype.

    Activations are rounded as they come, or were before. Codes are multiplied and summed in float32; scales, bias and residual
    follow.

    Args:
        codes: float8_e4m3fn [out_features, in_features].
        scales: float32 [out_features, 1], `w = code * scale`.
        bias: float [out_features].
        residual: float [num_tokens, out_features].
        per_token: activations have a scale per token; otherwise one for all, and a token's depends on those beside it.
    """
    x_codes, x_scales = x[:2] if isinstance(x, TokenCodes) else quantize_fp8(x, per_row=per_token)
    y = (x_codes.float() @ codes.float().t()) * x_scales * scales.t()
    for term in (bias, residual):
        y = y if term is None else y + term.float()
    return y.to(x.dtype)


def dequantize_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [out_features, in_features]."""
    return codes.float() * scales


def _divided(x: Tensor, scale: Tensor | float) -> Tensor:
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    return torch.where(scale == 0, x.float() * 0.0, x.float() / scale)
