"""How many values of fp8 layers lie beyond what their scales can hold, and are cut off there.

Scales that are made of the values themselves hold the largest of them. A checkpoint's scales of weights may have been rounded
down, or be those of other weights. Activations get theirs as they come, so that a count above 0 says that they are too small
for a scale in float32 to be near them. No torch at module level.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.experiments.layer_error import KINDS, activation_dtype, comparable_layers, dense_weight, run_in_windows
from backend.experiments.quality import ProgressCallback, check_text
from backend.experiments.text_pass import TextModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from backend.quantization.base import PackedWeight
    from backend.quantization.fp8 import FP8Weight


@dataclass(frozen=True, slots=True)
class Saturation:
    """Of one fp8 layer; what saturates is what `kernels.reference.fp8_linear.count_saturated` counts.

    Attributes:
        kind: one of `KINDS`.
        saturated_weights: of `num_weights`.
        saturated_activations: of `num_activations`, the inputs of the layer over all tokens of the text.
    """

    layer: int
    kind: str
    saturated_weights: int
    num_weights: int
    saturated_activations: int
    num_activations: int


def measure_saturation(
    model: TextModel,
    reference: TextModel,
    token_ids: Sequence[int],
    *,
    window: int = 1024,
    max_tokens: int | None = None,
    on_progress: ProgressCallback = lambda *_: None,
) -> list[Saturation]:
    """Of each fp8 layer, over a text in windows that do not overlap; without such a layer nothing is run.

    As for `measure_layer_errors`, weights and activations are those of the reference, and scales those of `model`.

    Args:
        reference: the same model, not quantized.
    Raises:
        ConfigError: the text cannot be measured, or the models' layers cannot be compared one by one.
    """
    import torch

    read = check_text(token_ids, [model, reference], window=window, stride=window, max_tokens=max_tokens)
    layers = comparable_layers(model, reference)
    decoder = reference.loaded.model
    dtype = activation_dtype(reference)
    probes: list[_Probe] = []
    with torch.inference_mode(), ExitStack() as hooks:
        for layer in range(len(decoder.layers)):
            for kind, name in KINDS.items():
                path = f"layers.{layer}.{name}"
                scaled = _ScaledFP8.of(layers[path].packed) if path in layers else None
                if scaled is None:
                    continue
                module = decoder.get_submodule(path)
                # Before there is a hook: a weight may be had by a product of the module.
                probes.append(_Probe(layer, kind, scaled, dense_weight(module, dtype)))
                hooks.callback(module.register_forward_pre_hook(probes[-1]).remove)
        if not probes:
            return []
        run_in_windows(reference, read, window, "counting what saturates", on_progress)
    return [probe.result() for probe in probes]


@dataclass(frozen=True, slots=True)
class _ScaledFP8:
    """An fp8 weight, and by what weights and activations of the reference are scaled to be those that it stores and takes.

    Attributes:
        inputs: float32 [in_features], or 1.
        outputs: float32 [out_features, 1], or 1.
    """

    packed: FP8Weight
    inputs: Tensor | float = 1.0
    outputs: Tensor | float = 1.0

    @classmethod
    def of(cls, packed: PackedWeight) -> _ScaledFP8 | None:
        """None where it is stored otherwise."""
        from backend.quantization.fp8 import FP8Weight
        from backend.quantization.unfolded_weight import UnfoldedWeight

        if isinstance(packed, UnfoldedWeight) and isinstance(packed.packed, FP8Weight):
            return cls(packed.packed, packed.inputs, packed.outputs[:, None])
        return cls(packed) if isinstance(packed, FP8Weight) else None

    def count_weights(self, weight: Tensor) -> int:
        from kernels.reference.fp8_linear import count_saturated

        return count_saturated(weight / self.outputs * self.inputs, self.packed.scales)

    def count_activations(self, x: Tensor) -> int:
        from kernels.reference.fp8_linear import count_saturated, quantize_fp8

        x = (x.float() / self.inputs).to(x.dtype)
        _, scales = quantize_fp8(x, per_row=self.packed.granularity == "channel")
        return count_saturated(x, scales)


class _Probe:
    """A hook before a layer of the reference."""

    def __init__(self, layer: int, kind: str, scaled: _ScaledFP8, weight: Tensor) -> None:
        self._layer, self._kind, self._scaled = layer, kind, scaled
        self._saturated_weights, self._num_weights = scaled.count_weights(weight), weight.numel()
        self._saturated = self._num_activations = 0

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._saturated += self._scaled.count_activations(inputs[0])
        self._num_activations += inputs[0].numel()

    def result(self) -> Saturation:
        return Saturation(
            self._layer,
            self._kind,
            self._saturated_weights,
            self._num_weights,
            self._saturated,
            self._num_activations,
        )
