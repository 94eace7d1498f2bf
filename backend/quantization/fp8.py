"""`fp8`: weights and activations in E4M3, 4 significant bits; what they are multiplied in is a tensor core's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from backend.quantization.base import PackedWeight
from kernels.reference.fp8_linear import dequantize_fp8, fp8_linear, quantize_fp8

# channel: a scale per output channel and per token. tensor: one of all weights and one of all activations.
Granularity = Literal["channel", "tensor"]


@dataclass(frozen=True, slots=True)
class FP8Weight(PackedWeight):
    """`w = code * scale`; tensors as `kernels.reference.fp8_linear` describes them.

    A scale of the whole matrix is stored for each row, so that rows stay independent.
    """

    codes: Tensor
    scales: Tensor
    granularity: Granularity

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        return dequantize_fp8(self.codes, self.scales)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8_linear(x, self.codes, self.scales, bias, per_token=self.granularity == "channel")


@dataclass(frozen=True, slots=True)
class FP8:
    granularity: Granularity
    name: str = "fp8"
    bits: int = 8

    def quantize(self, weight: Tensor) -> FP8Weight:
        return FP8Weight(*quantize_fp8(weight, per_row=self.granularity == "channel"), self.granularity)
