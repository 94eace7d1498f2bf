"""`UnfoldedWeight`: a packed matrix seen without scales that the layers around it undo."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.quantization.base import PackedWeight


@dataclass(frozen=True, slots=True)
class UnfoldedWeight(PackedWeight):
    """`W = diag(outputs) Q diag(1 / inputs)`, computed as `Q` itself would be, between inputs and outputs so scaled.

    Attributes:
        packed: Q, whose bytes are this one's.
        inputs: float32 [in_features], by which the layer before divides.
        outputs: float32 [out_features], by which the layer behind multiplies.
    """

    packed: PackedWeight
    inputs: Tensor
    outputs: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def emulated(self) -> bool:
        return self.packed.emulated

    def dequantize(self) -> Tensor:
        return self.packed.dequantize() * self.outputs[:, None] / self.inputs

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output = (self.packed.linear((x.float() / self.inputs).to(x.dtype)).float() * self.outputs).to(x.dtype)
        return output if bias is None else output + bias
