"""A linear layer over a quantized weight, in the place of a `Linear`."""

from __future__ import annotations

from torch import Tensor, nn

from backend.quantization.base import PackedWeight


class QuantizedLinear(nn.Module):
    """`y = x W^T + b`. The output may be several projections side by side, as in `Linear`."""

    def __init__(self, packed: PackedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.packed = packed
        self.out_features, self.in_features = packed.shape
        self.bias = bias

    def prepare(self) -> None:
        """Lay the loaded weight out for the device."""
        self.packed = self.packed.prepare()

    def forward(self, x: Tensor) -> Tensor:
        """float [num_tokens, in_features] -> [num_tokens, out_features], same dtype."""
        return self.packed.linear(x, self.bias)
