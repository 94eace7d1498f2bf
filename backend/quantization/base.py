"""The seams of quantization: `QuantMethod` makes a `PackedWeight` of a matrix, and a layer computes with that alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from backend.errors import ModelError


class PackedWeight(ABC):
    """A matrix [out_features, in_features] in fewer bits, as it lies on its device.

    Rows are outputs: what is stored of a row says all of it, so that projections side by side are cut and joined by rows.
    Subclasses are dataclasses; their tensors have a row for each output.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""

    def tensors(self) -> dict[str, Tensor]:
        """All that is stored, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: str) -> Self:
        return self._with({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def prepare(self) -> PackedWeight:
        """The same weight laid out for a kernel of its device, where there is one."""
        return self

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Rows under rows, of parts alike but for their number of rows."""
        names = parts[0].tensors()
        return parts[0]._with({name: torch.cat([part.tensors()[name] for part in parts]) for name in names})

    @abstractmethod
    def dequantize(self) -> Tensor:
        """float32 [out_features, in_features]: the matrix that `linear` multiplies by, but for the rounding of activations."""

    @abstractmethod
    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`y = x W^T + b`: float [num_tokens, in_features] -> [num_tokens, out_features], same dtype."""

    def add_to(self, residual: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
        """`residual += x W^T + b`, in place: float [num_tokens, out_features], x's dtype."""
        residual += self.linear(x, bias)

    @property
    def emulated(self) -> bool:
        """Whether `linear` computes by a reference, whose speed says nothing, instead of a kernel made for this storage."""
        return True

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """Scales and zero points included."""
        return self.nbytes * 8 / (self.shape[0] * self.shape[1])

    def _with(self, tensors: dict[str, Tensor]) -> Self:
        return replace(self, **tensors)  # type: ignore[type-var]


class QuantMethod(Protocol):
    """How weights are chosen. `name` is that of `quantization.method`; `bits` a weight takes, scales aside."""

    @property
    def name(self) -> str: ...

    @property
    def bits(self) -> int: ...

    def quantize(self, weight: Tensor) -> PackedWeight:
        """Args:
        weight: float [out_features, in_features], finite.
        """
        ...


def check_finite(name: str, weight: Tensor) -> None:
    """Raise `ModelError` naming a tensor with values that no scale can hold."""
    if not weight.isfinite().all():
        bad = int((~weight.isfinite()).sum())
        raise ModelError(f"{name} has {bad:,} values that are infinite or NaN: it cannot be quantized")
