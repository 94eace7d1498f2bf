"""`llm_int8`: as `w8a8_int8`, with inputs that have outliers in the model's dtype (LLM.int8(), arXiv:2208.07339)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.quantization.base import PackedWeight
from kernels.reference.int8_linear import dequantize_int8, quantize_rows_int8
from kernels.reference.llm_int8_linear import llm_int8_linear

PAPER_THRESHOLD = 6.0


@dataclass(frozen=True, slots=True)
class LLMInt8Weight(PackedWeight):
    """`w = code * scale`; tensors and what is exact as `kernels.reference.llm_int8_linear` describes them."""

    codes: Tensor
    scales: Tensor
    threshold: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        return dequantize_int8(self.codes, self.scales)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return llm_int8_linear(x, self.codes, self.scales, bias, threshold=self.threshold)


@dataclass(frozen=True, slots=True)
class LLMInt8:
    threshold: float
    name: str = "llm_int8"
    bits: int = 8

    def quantize(self, weight: Tensor) -> LLMInt8Weight:
        return LLMInt8Weight(*quantize_rows_int8(weight), self.threshold)
