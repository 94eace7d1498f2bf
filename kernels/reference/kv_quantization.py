"""How a vector (a key or a value of one token and KV head) is stored in 8 or 4 bits, in plain torch.

Each vector has scales of its own, so what a token stores depends on nothing but its own key and value. A vector with an
infinity or a NaN gets a NaN for its scale: it stays visible, and in that vector alone. The dtype of the data says the format:

- int8: `x = scale * code`, codes -127 to 127.
- float8_e4m3fn: `x = scale * code`, codes of at most 448, clamped before the cast, which makes NaN of larger ones elsewhere.
- uint8: `x = minimum + scale * code`, codes 0 to 15, two a byte: element i in the low half, element D/2 + i in the high one.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "int4": torch.uint8}
FLOAT16_MAX = 65504.0
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.uint8: 15.0}


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Args:
        x: float [..., head_dim], head_dim even for uint8
        dtype: int8, float8_e4m3fn or uint8, see above
    Returns:
        data: dtype [..., head_dim], for uint8 [..., head_dim / 2]
        scales: float16 [..., 1], for uint8 [..., 2]: scale and minimum
    """
    wide = x.float()
    finite = wide.isfinite().all(dim=-1, keepdim=True)
    wide = wide.where(finite, 0.0)
    largest = LARGEST_CODE[dtype]
    if dtype == torch.uint8:
        minimum = wide.amin(dim=-1, keepdim=True).clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
        wide = wide - minimum.float()
        scale = _scale(wide.amax(dim=-1, keepdim=True), largest)
        low, high = (_divided(wide, scale) + 0.5).floor().clamp(0.0, largest).to(dtype).chunk(2, dim=-1)
        return low | high << 4, torch.cat((scale, minimum), dim=-1).where(finite, torch.nan)
    scale = _scale(wide.abs().amax(dim=-1, keepdim=True), largest)
    codes = _divided(wide, scale)
    if dtype == torch.int8:
        codes = (codes + 0.5).floor()
    return codes.clamp(-largest, largest).to(dtype), scale.where(finite, torch.nan)


def dequantize(data: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., head_dim] of what `quantize` gave."""
    scale = scales[..., :1].float()
    if data.dtype != torch.uint8:
        return data.float() * scale
    return torch.cat((data & 15, data >> 4), dim=-1).float() * scale + scales[..., 1:].float()


def rotate(x: Tensor) -> Tensor:
    """The vectors times the orthonormal Hadamard matrix, which spreads an outlier over all of its vector's elements.

    With q and k both rotated their products stay (QuaRot, Ashkboos et al., 2024, arXiv:2404.00456). By butterflies in
    fp32, rounded once to x.dtype.

    Args:
        x: float [..., head_dim], head_dim a power of two
    """
    head_dim = x.shape[-1]
    wide, stride = x.float(), head_dim // 2
    while stride:
        left, right = wide.unflatten(-1, (-1, 2, stride)).unbind(-2)
        wide = torch.stack((left + right, left - right), dim=-2).flatten(-3)
        stride //= 2
    return (wide * head_dim**-0.5).to(x.dtype)


def _scale(range_: Tensor, largest: float) -> Tensor:
    """float16: that of codes up to `largest`. What a float16 cannot hold is clamped, and so are the codes then."""
    return (range_ / largest).clamp(0.0, FLOAT16_MAX).half()


def _divided(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, where a scale of 0 leaves of x what rounds to 0 anyway, or is a constant that needs no code."""
    wide = scale.float()
    return x / wide.where(wide > 0.0, 1.0)
