"""`IntWeight`: integer codes with a scale per group of inputs, and how a group's codes are chosen by rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from backend.quantization.base import PackedWeight
from backend.quantization.group_size import CHANNEL
from kernels.cpu.row_tiles import from_row_tiles, to_row_tiles
from kernels.cpu.support import has_cpu_kernels
from kernels.reference.code_grid import CodeGrid
from kernels.reference.int_linear import dequantize_int
from kernels.reference.int_words import codes_per_word, from_chunks, pack_words, to_chunks

# none: codes lie around the middle of their range. integer: around a code per group. float: above a number per group.
ZeroPoint = Literal["none", "integer", "float"]
ZERO_POINTS: tuple[ZeroPoint, ...] = ("none", "integer", "float")
KERNEL_BITS = (4, 8)
KERNEL_GROUP = 32  # columns, of which the Triton kernel takes a multiple


@dataclass(frozen=True, slots=True)
class IntWeight(PackedWeight):
    """`w = (q - z) * s` or `w = q * s + m`; tensors as `kernels.reference.int_linear.dequantize_int` describes them."""

    bits: int
    in_features: int
    words: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    minimums: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.in_features

    @property
    def group_size(self) -> int:
        return self.in_features // self.scales.shape[1]

    def prepare(self) -> PackedWeight:
        if self.words.is_cuda and self._has_kernel():
            return KernelIntWeight.of(self)
        if self._has_cpu_kernel():
            return CpuIntWeight.of(self)
        return self

    def dequantize(self) -> Tensor:
        return dequantize_int(self.words, self.scales, self.zero_points, self.minimums, self.bits, self.in_features)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.dequantize().to(x.dtype), bias)

    def _has_kernel(self) -> bool:
        return self.bits in KERNEL_BITS and (self.scales.shape[1] == 1 or self.group_size % KERNEL_GROUP == 0)

    def _has_cpu_kernel(self) -> bool:
        if self.words.device.type != "cpu" or self.bits not in KERNEL_BITS or not has_cpu_kernels():
            return False
        if self.scales.shape[1] > 1 and self.group_size % codes_per_word(self.bits):
            return False
        numbers = self.scales if self.minimums is None else self.minimums
        return self.scales.dtype == numbers.dtype and numbers.dtype in (torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class KernelIntWeight(PackedWeight):
    """An `IntWeight` as the Triton kernel takes it: its codes in chunks, see `kernels.reference.int_words.to_chunks`.

    The numbers of a group are side by side for all rows, as [num_groups, out_features] would have them.
    """

    bits: int
    in_features: int
    words: Tensor
    scales: Tensor
    zero_points: Tensor | None
    minimums: Tensor | None

    @classmethod
    def of(cls, weight: IntWeight) -> KernelIntWeight:
        zero_points = None if weight.zero_points is None else weight.zero_points.to(torch.int16)
        words = to_chunks(weight.words, weight.bits)
        grid = [_columns_dense(tensor) for tensor in (weight.scales, zero_points, weight.minimums)]
        assert grid[0] is not None
        return cls(weight.bits, weight.in_features, words, grid[0], grid[1], grid[2])

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.in_features

    @property
    def emulated(self) -> bool:
        return False

    def dequantize(self) -> Tensor:
        words = from_chunks(self.words, self.bits, self.in_features)
        return dequantize_int(words, self.scales, self.zero_points, self.minimums, self.bits, self.in_features)

    @property
    def code_grid(self) -> CodeGrid:
        """What the fused kernels take beside `words`."""
        return CodeGrid(self.bits, self.scales, self.zero_points, self.minimums)

    def linear(self, x: Tensor, bias: Tensor | None = None, *, output: Tensor | None = None) -> Tensor:
        """As `PackedWeight.linear`, into `output` if there is one: x's dtype, or float32 without a rounding before."""
        return self._product(x, bias, None, output)

    def add_to(self, residual: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
        self._product(x, bias, residual, residual)

    def _product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, output: Tensor | None) -> Tensor:
        from kernels.ops.int_linear import int_linear  # needs triton, which a CPU does without

        grid = (self.scales, self.bits, self.zero_points, self.minimums)
        return int_linear(x, self.words, *grid, bias, residual, output=output)


@dataclass(frozen=True, slots=True)
class CpuIntWeight(PackedWeight):
    """An `IntWeight` as the CPU's kernel takes it, see `kernels.cpu.int_linear`: tensors in tiles of 16 rows."""

    bits: int
    out_features: int
    in_features: int
    words: Tensor
    scales: Tensor
    zero_points: Tensor | None
    minimums: Tensor | None

    @classmethod
    def of(cls, weight: IntWeight) -> CpuIntWeight:
        """Compiles the kernel too, where this process has not yet run it for such a weight: no request waits for that."""
        from kernels.cpu.int_linear import prepare_int_linear, to_signed  # needs llvmlite

        words = to_row_tiles(to_signed(weight.words, weight.bits))
        scales, zero_points, minimums = (
            None if tensor is None else to_row_tiles(tensor)
            for tensor in (weight.scales, weight.zero_points, weight.minimums)
        )
        assert scales is not None
        prepare_int_linear(words, scales, weight.bits, zero_points, minimums)
        return cls(weight.bits, *weight.shape, words, scales, zero_points, minimums)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def emulated(self) -> bool:
        return False

    def dequantize(self) -> Tensor:
        from kernels.cpu.int_linear import to_signed

        words = to_signed(from_row_tiles(self.words, self.out_features), self.bits)
        scales, zero_points, minimums = (
            None if tensor is None else from_row_tiles(tensor, self.out_features)
            for tensor in (self.scales, self.zero_points, self.minimums)
        )
        assert scales is not None
        return dequantize_int(words, scales, zero_points, minimums, self.bits, self.in_features)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        from kernels.cpu.int_linear import int_linear

        return int_linear(
            x,
            self.words,
            self.scales,
            self.bits,
            self.zero_points,
            self.minimums,
            bias,
            out_features=self.out_features,
        )


class Grid(NamedTuple):
    """What a group's codes stand for: `w = (q - zeros) * scales`, or with minimums `w = q * scales + minimums`.

    scales: float [out_features, num_groups]; zeros: uint8 likewise or None; minimums: float likewise or None.
    """

    scales: Tensor
    zeros: Tensor | None
    minimums: Tensor | None


def fit_grid(weight: Tensor, bits: int, group_size: int, zero_point: ZeroPoint) -> Grid:
    """The grid that just holds each group.

    Steps and minimums are float16, and float32 where there is one per channel. Rounding to codes then errs by half a step,
    and in float16 at the range's end by 2^-11 of that end more. A step that rounds to 0 stays 0: with a minimum such a group
    is the constant it nearly is, otherwise all zeros.

    Args:
        weight: float32 [out_features, in_features].
    """
    groups = _cut(weight, group_size)
    low, high = groups.amin(2), groups.amax(2)
    top = (1 << bits) - 1
    dtype = torch.float32 if groups.shape[1] == 1 else torch.float16
    match zero_point:
        case "none":
            scales = torch.maximum(-low, high) * (2 / top)
            return Grid(_saturated(scales, dtype), None, None)
        case "integer":
            # The range has to hold 0, which is a code then: it is exact, as padding and pruned weights want it.
            low, high = low.clamp(max=0), high.clamp(min=0)
            scales = _saturated((high - low) / top, dtype)
            zeros = torch.where(scales > 0, -low / scales.float(), 0).round().clamp(0, top)
            return Grid(scales, zeros.to(torch.uint8), None)
        case "float":
            return Grid(_saturated((high - low) / top, dtype), None, _saturated(low, dtype))


def round_to_grid(weight: Tensor, grid: Grid, bits: int) -> Tensor:
    """The nearest codes, uint8 [out_features, in_features] of float32 `weight` likewise."""
    groups = weight.view(*grid.scales.shape, -1)
    scales = grid.scales.float()[:, :, None]
    if grid.minimums is not None:
        groups = groups - grid.minimums.float()[:, :, None]
        zero = 0.0
    else:
        zero = float(1 << (bits - 1)) if grid.zeros is None else grid.zeros.float()[:, :, None]
    codes = torch.where(scales > 0, groups / scales, 0).round() + zero
    return codes.clamp(0, (1 << bits) - 1).to(torch.uint8).flatten(1)


def quantize_by_rounding(weight: Tensor, bits: int, group_size: int, zero_point: ZeroPoint) -> IntWeight:
    """Round-to-nearest: every weight to the nearest code of its group's grid.

    Args:
        weight: float [out_features, in_features], finite.
        bits: 2 to 8.
    """
    weight = weight.float()
    grid = fit_grid(weight, bits, group_size, zero_point)
    return pack(round_to_grid(weight, grid, bits), grid, bits)


def pack(codes: Tensor, grid: Grid, bits: int) -> IntWeight:
    """Codes [out_features, in_features] on their grid, as a layer stores them."""
    return IntWeight(bits, codes.shape[1], pack_words(codes, bits), grid.scales, grid.zeros, grid.minimums)


def _cut(weight: Tensor, group_size: int) -> Tensor:
    """[out_features, num_groups, group_size]."""
    return weight.unflatten(1, (-1, weight.shape[1] if group_size == CHANNEL else group_size))


def _columns_dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.t().contiguous().t()


def _saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)
