"""`PermutedWeight`: a weight whose columns are stored in another order than the inputs come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from backend.quantization.base import PackedWeight


@dataclass(frozen=True, slots=True)
class PermutedWeight(PackedWeight):
    """Column k of `weight` belongs to input `order[k]`: inputs are put in that order before they are multiplied.

    So the columns of a group, which kernels want side by side, may belong to inputs from anywhere (GPTQ's act-order).

    Attributes:
        weight: [out_features, in_features].
        order: int64 [in_features], a permutation.
    """

    weight: PackedWeight
    order: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    def tensors(self) -> dict[str, Tensor]:
        return self.weight.tensors() | {"order": self.order}

    def to(self, device: str) -> Self:
        return replace(self, weight=self.weight.to(device), order=self.order.to(device))

    def prepare(self) -> PackedWeight:
        return replace(self, weight=self.weight.prepare())

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Raise `ValueError` for parts whose columns are not in one order."""
        weights = [part.weight for part in parts]
        return replace(parts[0], weight=type(weights[0]).join(weights), order=common_order(parts))

    def dequantize(self) -> Tensor:
        stored = self.weight.dequantize()
        return torch.empty_like(stored).index_copy_(1, self.order, stored)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.weight.linear(x.index_select(1, self.order), bias)

    @property
    def emulated(self) -> bool:
        return self.weight.emulated


def common_order(weights: Sequence[PackedWeight]) -> Tensor:
    """Of their columns. Raises `ValueError` where they are not all in one, other than that of the inputs."""
    orders = [weight.order for weight in weights if isinstance(weight, PermutedWeight)]
    if len(orders) < len(weights) or not all(torch.equal(order, orders[0]) for order in orders):
        raise ValueError("weights whose columns are in different orders cannot be joined")
    return orders[0]
