"""What quantizing costs each linear layer of a model, and what the whole model loses by one of them.

The error of a layer is that of its output on the activations that reach it in the reference: ||X W^T - Q(X)||_F / ||X W^T||_F,
where Q(X) is what the quantized layer makes of X, without bias. Where weights alone are quantized, that is
||X (W - Q)^T||_F / ||X W^T||_F; a method that rounds activations too has their error in it. Activations are those of the
reference, so that no layer answers for the ones before it; products are in float32, sums of squares in float64.

The scan puts one layer of the quantized model, or one kind, into the reference at a time. Its layers are those of the
quantized model: a group size that was left open stays the one that fits all of them. Scales that a checkpoint's layers undo
among each other, as those of awq, are taken out first (`unfolded_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from backend.errors import ConfigError
from backend.experiments.quality import ProgressCallback, Quality, check_text, score, summarize
from backend.experiments.text_pass import TextModel
from backend.experiments.unfolded_layers import differing_norm, unfolded_layers

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from backend.layers.quantized_linear import QuantizedLinear
    from backend.models.decoder import Decoder
    from backend.quantization.base import PackedWeight

KINDS = {"qkv": "attention.qkv", "output": "attention.output", "gate_up": "mlp.gate_up", "down": "mlp.down"}
ALL = "all"  # the part of a scan that is all layers together
NUM_CHANNELS = 3  # of the largest, that are named


@dataclass(frozen=True, slots=True)
class Channel:
    """An input of a layer; `ratio` is its root mean square over the median channel's, None where that is 0."""

    channel: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class LayerError:
    """Errors are relative, in the Frobenius norm; None where the reference's is 0.

    Attributes:
        kind: one of `KINDS`.
        weight_error: ||W - Q|| / ||W||.
        bits_per_weight: scales included.
        largest_channels: of the layer's input, descending.
    """

    layer: int
    kind: str
    output_error: float | None
    weight_error: float | None
    bits_per_weight: float
    largest_channels: tuple[Channel, ...]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The reference with a part of its layers quantized.

    Attributes:
        part: a kind, a linear layer by its name in the decoder, or `ALL`.
    """

    part: str
    num_layers: int
    quality: Quality


def measure_layer_errors(
    model: TextModel,
    reference: TextModel,
    token_ids: Sequence[int],
    *,
    window: int = 1024,
    max_tokens: int | None = None,
    on_progress: ProgressCallback = lambda *_: None,
) -> list[LayerError]:
    """Of each quantized layer, over a text in windows that do not overlap.

    Args:
        reference: the same model, whose weights are W.
    Raises:
        ConfigError: the text cannot be measured, or the models' layers cannot be compared one by one.
    """
    import torch

    read = check_text(token_ids, [model, reference], window=window, stride=window, max_tokens=max_tokens)
    layers = comparable_layers(model, reference)
    dtype = activation_dtype(reference)
    with torch.inference_mode(), ExitStack() as hooks:
        probes = {}
        for path, layer in layers.items():
            module = reference.loaded.model.get_submodule(path)
            probes[path] = probe = _Probe(dense_weight(module, dtype), layer.packed)
            hooks.callback(module.register_forward_pre_hook(probe).remove)
        run_in_windows(reference, read, window, "measuring layers", on_progress)
        return [probe.result(*layer_and_kind(path)) for path, probe in probes.items()]


def scan_sensitivity(
    model: TextModel,
    reference: TextModel,
    token_ids: Sequence[int],
    by: Literal["kind", "layer"],
    *,
    window: int = 1024,
    max_tokens: int | None = None,
    on_part: Callable[[Sensitivity], None] = lambda part: None,
    on_progress: ProgressCallback = lambda *_: None,
) -> list[Sensitivity]:
    """The quality of the reference with one part quantized, for each part, then for all of them together.

    Over the first window of the text, as each part is a pass of the whole model. The head stays the reference's. Raises as
    `measure_layer_errors`.

    Args:
        on_part: gets each part at once.
    """
    import torch

    read = check_text(token_ids, [model, reference], window=window, stride=window, max_tokens=max_tokens)[:window]
    layers = comparable_layers(model, reference)
    if by == "kind":
        parts = {kind: [path for path in layers if layer_and_kind(path)[1] == kind] for kind in KINDS}
    else:
        parts = {path: [path] for path in layers}
    parts = {name: members for name, members in parts.items() if members} | {ALL: list(layers)}
    runner = reference.through_modules()
    caches = runner.allocate(len(read))
    measured = []
    with torch.inference_mode():
        plain = runner.run(read[:-1], caches)
        for index, (name, members) in enumerate(parts.items()):
            on_progress("scanning", index, len(parts))
            with _exchanged(reference.loaded.model, {path: layers[path] for path in members}):
                hidden = runner.run(read[:-1], caches)
            scores = list(score([runner, runner], [hidden, plain], read[1:]))
            measured.append(Sensitivity(name, len(members), summarize(torch.cat(scores, dim=1))))
            on_part(measured[-1])
    on_progress("scanning", len(parts), len(parts))
    return measured


def comparable_layers(model: TextModel, reference: TextModel) -> dict[str, QuantizedLinear]:
    """The quantized layers of a model by their names in the decoder, in order, as they can stand in the reference.

    Raises:
        ConfigError: there are none, or the reference is another model or runs otherwise.
    """
    from backend.layers.quantized_linear import QuantizedLinear

    decoder, other, dtype = model.loaded.model, reference.loaded.model, activation_dtype(reference)
    shapes = [_linear_shapes(each) for each in (decoder, other)]
    if shapes[0] != shapes[1]:
        raise ConfigError(f"the layers of {model.name} and of its reference {reference.name} have other shapes")
    if (model.device, activation_dtype(model)) != (reference.device, dtype):
        raise ConfigError("layers are compared in one dtype on one device; model and reference differ in them")
    if not model.loaded.num_quantized_layers:
        raise ConfigError(f"{model.name} has no quantized layer to look at; set quantization.method")
    if model.loaded.quantization.method is None:  # a checkpoint, which may have been scaled
        return unfolded_layers(decoder, other, lambda module: dense_weight(module, dtype))
    if name := differing_norm(decoder, other):
        raise ConfigError(f"{name} differs from that of the reference {reference.name}: it is another model")
    layers = {path: decoder.get_submodule(path) for path in shapes[0]}
    return {path: layer for path, layer in layers.items() if isinstance(layer, QuantizedLinear)}


def dense_weight(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """float32 [out_features, in_features] of a linear layer, dequantized where it is not dense.

    Args:
        dtype: of the activations that it takes.
    """
    import torch

    from backend.layers.linear import Linear
    from backend.layers.quantized_linear import QuantizedLinear

    if isinstance(module, QuantizedLinear):
        return module.packed.dequantize()
    assert isinstance(module, Linear)
    if module.weight is not None:
        return module.weight.float()
    # Laid out for the CPU's kernels. Each sum over a row of the identity has one term, and is exact.
    bias, module.bias = module.bias, None
    try:
        return module(torch.eye(module.in_features, dtype=dtype)).T.float().contiguous()
    finally:
        module.bias = bias


class _Probe:
    """A hook before a layer of the reference, which adds up what the layer and its quantized form make of the input."""

    def __init__(self, weight: Tensor, packed: PackedWeight) -> None:
        self._weight, self._packed = weight, packed
        self._signal = self._noise = 0.0
        self._channels: Tensor | None = None  # float64 [in_features], sums of squares

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float()
        output = x @ self._weight.T
        self._signal += float(output.double().square().sum())
        self._noise += float((output - self._packed.linear(x)).double().square().sum())
        squares = x.double().square().sum(dim=0)
        self._channels = squares if self._channels is None else self._channels + squares

    def result(self, layer: int, kind: str) -> LayerError:
        assert self._channels is not None
        sizes = self._channels.sqrt()
        median, largest = float(sizes.median()), sizes.topk(min(NUM_CHANNELS, len(sizes)))
        weight = self._weight.double()
        return LayerError(
            layer,
            kind,
            output_error=_relative(self._noise, self._signal),
            weight_error=_relative(
                float((weight - self._packed.dequantize().double()).square().sum()), float(weight.square().sum())
            ),
            bits_per_weight=self._packed.bits_per_weight,
            largest_channels=tuple(
                Channel(channel, size / median if median else None)
                for size, channel in zip(largest.values.tolist(), largest.indices.tolist(), strict=True)
            ),
        )


def _relative(noise: float, signal: float) -> float | None:
    """The root of a quotient of sums of squares."""
    return (noise / signal) ** 0.5 if signal else None


def _linear_shapes(decoder: Decoder) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of each linear layer but the head, by its name in the decoder."""
    modules = {
        f"layers.{index}.{name}": decoder.get_submodule(f"layers.{index}.{name}")
        for index in range(len(decoder.layers))
        for name in KINDS.values()
    }
    return {path: (module.in_features, module.out_features) for path, module in modules.items()}  # type: ignore[misc]


def layer_and_kind(path: str) -> tuple[int, str]:
    """Of a linear layer by its name in the decoder, as layers.3.mlp.down."""
    _, layer, name = path.split(".", 2)
    return int(layer), next(kind for kind, module in KINDS.items() if module == name)


def activation_dtype(model: TextModel) -> torch.dtype:
    return model.loaded.model.final_norm.weight.dtype


def run_in_windows(
    model: TextModel, token_ids: Sequence[int], window: int, what: str, on_progress: ProgressCallback
) -> None:
    """Run a text through a model's modules, whose hooks see all of it, in windows that do not overlap.

    Args:
        what: is done by it, for `on_progress`.
    """
    runner = model.through_modules()
    caches = runner.allocate(min(window, len(token_ids)))
    for start in range(0, len(token_ids), window):
        on_progress(what, start, len(token_ids))
        runner.run(token_ids[start : start + window], caches)
    on_progress(what, len(token_ids), len(token_ids))


@contextmanager
def _exchanged(target: Decoder, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within, `target` has these layers in the place of its own."""
    own = {path: target.get_submodule(path) for path in layers}
    try:
        for path, module in layers.items():
            target.set_submodule(path, module)
        yield
    finally:
        for path, module in own.items():
            target.set_submodule(path, module)
