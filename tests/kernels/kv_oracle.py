"""What the formats of quantized vectors mean, by their definitions in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FORMATS = ("int8", "fp8_e4m3", "int4")
NUM_SCALES = {"int8": 1, "fp8_e4m3": 1, "int4": 2}


def e4m3_value(byte: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, and one NaN a sign (Micikevicius et al., 2022)."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = torch.tensor([e4m3_value(byte) for byte in range(256)], dtype=torch.float64)


def nearest_e4m3(x: float) -> int:
    """The byte of the nearest value, of two equally near ones that with an even mantissa; none but finite ones."""
    magnitudes = [abs(abs(x) - e4m3_value(byte)) for byte in range(127)]
    least = min(magnitudes)
    byte = next(
        byte for byte in range(127) if magnitudes[byte] == least and (byte % 2 == 0 or magnitudes.count(least) == 1)
    )
    return byte | (128 if math.copysign(1.0, x) < 0 else 0)


def decoded(data: Tensor, scales: Tensor | None) -> Tensor:
    """float64 [..., head_dim] of what a cache holds, on the CPU."""
    data = data.detach().cpu()
    if scales is None:
        return data.double()
    scales = scales.detach().cpu().double()
    if data.dtype == torch.uint8:
        codes = torch.cat((data % 16, data // 16), dim=-1).double()
        return scales[..., 1:] + scales[..., :1] * codes
    codes = data.double() if data.dtype == torch.int8 else E4M3[data.view(torch.uint8).long()]
    return codes * scales


def stored(vector: list[float], kv_format: str) -> tuple[list[int], list[float]]:
    """The bytes and scales of one vector of fp32 numbers."""
    if not all(math.isfinite(x) for x in vector):
        return [0] * (len(vector) // NUM_SCALES[kv_format]), [math.nan] * NUM_SCALES[kv_format]
    if kv_format == "int4":
        minimum = fp16(min(vector))
        scale = fp16(max(0.0, max(vector) - minimum) / 15)
        codes = [0 if scale == 0 else min(15, max(0, math.floor((x - minimum) / scale + 0.5))) for x in vector]
        half = len(codes) // 2
        return [low + 16 * high for low, high in zip(codes[:half], codes[half:], strict=True)], [scale, minimum]
    largest = {"int8": 127.0, "fp8_e4m3": 448.0}[kv_format]
    scale = fp16(max(abs(x) for x in vector) / largest)
    quotients = [x if scale == 0 else min(largest, max(-largest, x / scale)) for x in vector]
    if kv_format == "int8":
        return [math.floor(x + 0.5) % 256 for x in quotients], [scale]
    return [nearest_e4m3(x) for x in quotients], [scale]


def fp16(x: float) -> float:
    """Rounded to the nearest, and to the largest where there is none."""
    return float(torch.tensor(max(-65504.0, min(65504.0, x)), dtype=torch.float64).half())
