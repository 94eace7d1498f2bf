"""`int4`: weights of 2 to 8 bits by rounding to nearest, in groups. What computes stays in the model's dtype."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.quantization.int_weight import IntWeight, ZeroPoint, quantize_by_rounding


@dataclass(frozen=True, slots=True)
class Int4:
    bits: int
    group_size: int
    zero_point: ZeroPoint
    name: str = "int4"

    def quantize(self, weight: Tensor) -> IntWeight:
        return quantize_by_rounding(weight, self.bits, self.group_size, self.zero_point)
