"""`fp8`: weights and activations in E4M3, 4 significant bits; what they are multiplied in is a tensor core's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from backend.quantization.base import PackedWeight
from kernels.reference.fp8_linear import dequantize_fp8, fp8_linear, quantize_fp8
from kernels.reference.token_codes import TokenCodes

KERNEL_CAPABILITY = (8, 9)  # of a card, from which on it computes with such floats
MAX_KERNEL_INPUTS = 65536

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

    def prepare(self) -> PackedWeight:
        return KernelFP8Weight(self.codes, self.scales, self.granularity) if self._has_kernel() else self

    def dequantize(self) -> Tensor:
        return dequantize_fp8(self.codes, self.scales)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8_linear(x, self.codes, self.scales, bias, per_token=self.granularity == "channel")

    def _has_kernel(self) -> bool:
        device = self.codes.device
        is_small = self.codes.shape[1] <= MAX_KERNEL_INPUTS
        return device.type == "cuda" and is_small and torch.cuda.get_device_capability(device) >= KERNEL_CAPABILITY


@dataclass(frozen=True, slots=True)
class KernelFP8Weight(FP8Weight):
    """An `FP8Weight` that the Triton kernel multiplies by, which takes it as it is."""

    @property
    def emulated(self) -> bool:
        return False

    @property
    def token_dtype(self) -> torch.dtype | None:
        """Of the codes that `linear` and `add_to` take of tokens too; None where tokens have a scale together."""
        return torch.float8_e4m3fn if self.granularity == "channel" else None

    def linear(self, x: Tensor | TokenCodes, bias: Tensor | None = None) -> Tensor:
        return self._product(x, bias, None)

    def add_to(self, residual: Tensor, x: Tensor | TokenCodes, bias: Tensor | None = None) -> None:
        self._product(x, bias, residual)

    def _product(self, x: Tensor | TokenCodes, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        from kernels.ops.fp8_linear import fp8_linear as kernel_fp8_linear  # needs triton, which a CPU does without

        per_token = self.granularity == "channel"
        return kernel_fp8_linear(x, self.codes, self.scales, bias, residual, per_token, output=residual)


@dataclass(frozen=True, slots=True)
class FP8:
    granularity: Granularity
    name: str = "fp8"
    bits: int = 8

    def quantize(self, weight: Tensor) -> FP8Weight:
        return FP8Weight(*quantize_fp8(weight, per_row=self.granularity == "channel"), self.granularity)
