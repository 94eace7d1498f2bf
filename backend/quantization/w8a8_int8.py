"""`w8a8_int8`: weights and activations in int8, so that integers multiply. A scale per output channel and per token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.quantization.base import PackedWeight
from kernels.reference.int8_linear import dequantize_int8, int8_linear, quantize_rows_int8


@dataclass(frozen=True, slots=True)
class W8A8Weight(PackedWeight):
    """`w = code * scale`; tensors as `kernels.reference.int8_linear` describes them."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        return dequantize_int8(self.codes, self.scales)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return int8_linear(x, self.codes, self.scales, bias)


@dataclass(frozen=True, slots=True)
class W8A8Int8:
    name: str = "w8a8_int8"
    bits: int = 8

    def quantize(self, weight: Tensor) -> W8A8Weight:
        return W8A8Weight(*quantize_rows_int8(weight))
