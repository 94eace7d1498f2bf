"""`w8a8_int8`: weights and activations in int8, so that integers multiply. A scale per output channel and per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.quantization.base import PackedWeight
from kernels.cpu.row_tiles import from_row_tiles, to_row_tiles
from kernels.cpu.support import has_cpu_kernels
from kernels.reference.int8_linear import MAX_INT32_INPUTS, dequantize_int8, int8_linear, quantize_rows_int8
from kernels.reference.token_codes import TokenCodes

MAX_KERNEL_INPUTS = 65536  # of the Triton kernel


@dataclass(frozen=True, slots=True)
class W8A8Weight(PackedWeight):
    """`w = code * scale`; tensors as `kernels.reference.int8_linear` describes them."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def prepare(self) -> PackedWeight:
        in_features = self.codes.shape[1]
        if self.codes.is_cuda and in_features <= MAX_KERNEL_INPUTS:
            return KernelW8A8Weight(self.codes, self.scales)
        if self.codes.device.type == "cpu" and in_features <= MAX_INT32_INPUTS and has_cpu_kernels():
            return CpuW8A8Weight.of(self)
        return self

    def dequantize(self) -> Tensor:
        return dequantize_int8(self.codes, self.scales)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return int8_linear(x, self.codes, self.scales, bias)


@dataclass(frozen=True, slots=True)
class KernelW8A8Weight(W8A8Weight):
    """A `W8A8Weight` that the Triton kernel multiplies by, which takes it as it is."""

    @property
    def emulated(self) -> bool:
        return False

    @property
    def token_dtype(self) -> torch.dtype:
        """Of the codes that `linear` and `add_to` take of tokens too."""
        return torch.int8

    def linear(self, x: Tensor | TokenCodes, bias: Tensor | None = None) -> Tensor:
        return self._product(x, bias, None)

    def add_to(self, residual: Tensor, x: Tensor | TokenCodes, bias: Tensor | None = None) -> None:
        self._product(x, bias, residual)

    def _product(self, x: Tensor | TokenCodes, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        from kernels.ops.int8_linear import int8_linear as kernel_int8_linear  # needs triton, which a CPU does without

        return kernel_int8_linear(x, self.codes, self.scales, bias, residual, output=residual)


@dataclass(frozen=True, slots=True)
class CpuW8A8Weight(PackedWeight):
    """A `W8A8Weight` as the CPU's kernel takes it, see `kernels.cpu.int8_linear`: tensors in tiles of 16 rows."""

    out_features: int
    in_features: int
    words: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: W8A8Weight) -> CpuW8A8Weight:
        """Compiles the kernel too, where this process has not yet run it: no request waits for that."""
        from kernels.cpu.int8_linear import compile_int8_linear, to_tiles  # needs llvmlite

        compile_int8_linear()
        return cls(*weight.shape, to_tiles(weight.codes), to_row_tiles(weight.scales))

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def emulated(self) -> bool:
        return False

    def dequantize(self) -> Tensor:
        from kernels.cpu.int8_linear import from_tiles

        return dequantize_int8(from_tiles(self.words, *self.shape), from_row_tiles(self.scales, self.out_features))

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        from kernels.cpu.int8_linear import int8_linear as cpu_int8_linear

        return cpu_int8_linear(x, self.words, self.scales, bias, out_features=self.out_features)


@dataclass(frozen=True, slots=True)
class W8A8Int8:
    name: str = "w8a8_int8"
    bits: int = 8

    def quantize(self, weight: Tensor) -> W8A8Weight:
        return W8A8Weight(*quantize_rows_int8(weight))
