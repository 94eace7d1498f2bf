"""`nf4`: weights as quantiles of a normal distribution in 4 bits, blocks' magnitudes in 8 (QLoRA, arXiv:2305.14314)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from backend.quantization.base import PackedWeight
from backend.quantization.group_size import CHANNEL
from kernels.reference.int_words import pack_words
from kernels.reference.nf4_linear import NF4_LEVELS, dequantize_magnitudes, dequantize_nf4
from kernels.reference.nf4_words import from_nf4_chunks, to_nf4_chunks

KERNEL_BLOCK = 32  # inputs, of which the Triton kernel takes a multiple
_LARGEST_CODE = 127  # of a magnitude: as far on both sides of the mean
_ELEMENTS_AT_ONCE = 2**22  # of a weight while its nearest levels are looked for


@dataclass(frozen=True, slots=True)
class NF4Weight(PackedWeight):
    """`w = level[q] * (m + d * c)`; tensors as `kernels.reference.nf4_linear` describes them.

    The paper quantizes the blocks' magnitudes 256 together around their mean, which for narrow layers spans many rows. Here
    it is a row's, however many it has, so that rows stay independent. A weight then takes 4 + 8/block + 32/in_features bits:
    4.18 with 576 inputs, 4.15 with 1,536 and 4.13 with 4,096 in blocks of 64, where the paper's takes 4.127.
    """

    in_features: int
    words: Tensor
    magnitude_codes: Tensor
    magnitude_steps: Tensor
    magnitude_means: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.in_features

    @property
    def block_size(self) -> int:
        return self.in_features // self.magnitude_codes.shape[1]

    def prepare(self) -> PackedWeight:
        has_kernel = self.magnitude_codes.shape[1] == 1 or self.block_size % KERNEL_BLOCK == 0
        return KernelNF4Weight.of(self) if self.words.is_cuda and has_kernel else self

    def dequantize(self) -> Tensor:
        return dequantize_nf4(
            self.words, self.magnitude_codes, self.magnitude_steps, self.magnitude_means, self.in_features
        )

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.dequantize().to(x.dtype), bias)


@dataclass(frozen=True, slots=True)
class KernelNF4Weight(PackedWeight):
    """An `NF4Weight` as the Triton kernel takes it: its codes in chunks, see `kernels.reference.nf4_words.to_nf4_chunks`.

    The magnitudes' codes of a block are side by side for all rows, as [num_blocks, out_features] would have them.
    """

    in_features: int
    words: Tensor
    magnitude_codes: Tensor
    magnitude_steps: Tensor
    magnitude_means: Tensor

    @classmethod
    def of(cls, weight: NF4Weight) -> KernelNF4Weight:
        words = to_nf4_chunks(weight.words, weight.in_features)
        codes = weight.magnitude_codes.t().contiguous().t()
        return cls(weight.in_features, words, codes, weight.magnitude_steps, weight.magnitude_means)

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.in_features

    @property
    def emulated(self) -> bool:
        return False

    def dequantize(self) -> Tensor:
        words = from_nf4_chunks(self.words, self.in_features)
        return dequantize_nf4(words, self.magnitude_codes, self.magnitude_steps, self.magnitude_means, self.in_features)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._product(x, bias, None)

    def add_to(self, residual: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
        self._product(x, bias, residual)

    def _product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        from kernels.ops.nf4_linear import nf4_linear  # needs triton, which a CPU does without

        magnitudes = (self.magnitude_codes, self.magnitude_steps, self.magnitude_means)
        return nf4_linear(x, self.words, *magnitudes, bias, residual, output=residual)


@dataclass(frozen=True, slots=True)
class NF4:
    group_size: int
    name: str = "nf4"
    bits: int = 4

    def quantize(self, weight: Tensor) -> NF4Weight:
        blocks = weight.float().unflatten(1, (-1, weight.shape[1] if self.group_size == CHANNEL else self.group_size))
        stored = _quantize_magnitudes(blocks.abs().amax(2))
        # Levels are chosen for the magnitude that a layer will multiply by, so that its rounding is made good here.
        magnitudes = dequantize_magnitudes(*stored)
        rows = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
        codes = [
            _nearest_levels(part / where[:, :, None])
            for part, where in zip(blocks.split(rows), magnitudes.split(rows), strict=True)
        ]
        return NF4Weight(weight.shape[1], pack_words(torch.cat(codes).flatten(1), 4), *stored)


def _quantize_magnitudes(largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes around the mean of each row, with its step and mean in bfloat16, which has the range of float32."""
    limit = torch.finfo(torch.bfloat16).max
    means = largest.mean(1, keepdim=True).clamp(max=limit).bfloat16()
    distances = largest - means.float()
    steps = (distances.abs().amax(1, keepdim=True) / _LARGEST_CODE).bfloat16()
    codes = torch.where(steps > 0, distances / steps.float(), 0.0).round().clamp(-_LARGEST_CODE, _LARGEST_CODE)
    # Nothing below 0: a magnitude that small is rounded up.
    negative = codes * steps.float() + means.float() < 0
    return (codes + negative).to(torch.int8), steps, means


def _nearest_levels(values: Tensor) -> Tensor:
    """uint8 codes. Of a magnitude of 0 come infinities and NaN, whose codes are multiplied by it."""
    levels = torch.tensor(NF4_LEVELS, device=values.device)
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(values, middles).to(torch.uint8)
