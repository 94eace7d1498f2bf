"""`int8`: weights of 8 bits by rounding to nearest, a scale per output channel. What computes stays in the model's dtype."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.quantization.group_size import CHANNEL
from backend.quantization.int_weight import IntWeight, quantize_by_rounding


@dataclass(frozen=True, slots=True)
class Int8:
    name: str = "int8"
    bits: int = 8

    def quantize(self, weight: Tensor) -> IntWeight:
        return quantize_by_rounding(weight, 8, CHANNEL, "none")
