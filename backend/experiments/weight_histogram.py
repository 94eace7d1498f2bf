"""A layer's weights on the grid that a method lays over them: how many lie where, and which values the grid has.

Every group, row or matrix with a scale of its own has its own grid. Weights are shown in that scale, so that all grids of a
layer are one: for the integer grids in codes, for nf4 in the largest magnitude of its block, for fp8 in its scale.
No torch at module level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.errors import ConfigError
from backend.experiments.layer_error import KINDS
from backend.models.sources import ModelSource

if TYPE_CHECKING:
    from torch import Tensor

    from backend.config import QuantizationSettings
    from backend.models.model_config import DecoderConfig
    from backend.quantization.base import PackedWeight

NUM_BINS = 120


@dataclass(frozen=True, slots=True)
class WeightHistogram:
    """`edges` are one more than `counts`; `levels` are the grid's values, ascending; both in `unit`.

    Attributes:
        zero_steps: groups whose scale is 0; their weights are not counted.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    levels: tuple[float, ...]
    unit: str
    num_weights: int
    group_size: int
    zero_steps: int


def weight_histogram(source: ModelSource, settings: QuantizationSettings, layer: int, kind: str) -> WeightHistogram:
    """Of one linear layer, its projections together.

    Args:
        settings: of the method; defaults are filled in as when the model is loaded.
        kind: one of `KINDS`.
    Raises:
        ConfigError: the settings do not fit the model, or it has no such layer.
        ModelError: the model's files are damaged.
    """
    import torch

    from backend.models.layer_quantizer import LayerQuantizer
    from backend.quantization.methods import make_method

    config = _decoder_config(source)
    if kind not in KINDS or not 0 <= layer < config.num_layers:
        raise ConfigError(
            f"{source.name} has no layer {layer}, {kind}; there are 0 to {config.num_layers - 1}, {', '.join(KINDS)}"
        )
    method = make_method(LayerQuantizer(config, settings, torch.float32).settings)
    assert method is not None
    weight = _weight(source, config, layer, KINDS[kind])
    placed, scales, levels, unit = _on_grid(weight, method.quantize(weight))
    kept = placed[(scales > 0).expand_as(placed)]
    low, high = (float(kept.min()), float(kept.max())) if kept.numel() else (0.0, 1.0)
    counts = torch.histc(kept, NUM_BINS, low, high)
    step = (high - low) / NUM_BINS
    return WeightHistogram(
        edges=tuple(low + step * index for index in range(NUM_BINS + 1)),
        counts=tuple(int(count) for count in counts.tolist()),
        levels=tuple(levels),
        unit=unit,
        num_weights=weight.numel(),
        group_size=placed.shape[2],
        zero_steps=int((scales <= 0).sum()),
    )


def _on_grid(weight: Tensor, packed: PackedWeight) -> tuple[Tensor, Tensor, list[float], str]:
    """Weights in their group's scale [rows, groups, group_size], scales [rows, groups, 1], the grid's values, and its unit."""
    import torch

    from backend.quantization.fp8 import FP8Weight
    from backend.quantization.int_weight import IntWeight
    from backend.quantization.nf4 import NF4Weight
    from kernels.reference.nf4_linear import NF4_LEVELS, dequantize_magnitudes

    if isinstance(packed, NF4Weight):
        scales = dequantize_magnitudes(packed.magnitude_codes, packed.magnitude_steps, packed.magnitude_means)
        return *_placed(weight, scales, None), list(NF4_LEVELS), "in the largest magnitude of the block"
    if isinstance(packed, IntWeight):
        top = (1 << packed.bits) - 1
        if packed.minimums is not None:
            return *_placed(weight, packed.scales, packed.minimums), [float(code) for code in range(top + 1)], "codes"
        middle = 1 << (packed.bits - 1)
        zeros = torch.full_like(packed.scales, middle) if packed.zero_points is None else packed.zero_points
        minimums = -zeros.float() * packed.scales.float()
        return *_placed(weight, packed.scales, minimums), [float(code) for code in range(top + 1)], "codes"
    codes, scales = packed.tensors()["codes"], packed.tensors()["scales"]
    if isinstance(packed, FP8Weight):
        every = torch.arange(256, dtype=torch.uint8).view(codes.dtype).float()
        return *_placed(weight, scales, None), every[every.isfinite()].unique().tolist(), "in the scale, E4M3 values"
    return *_placed(weight, scales, None), [float(code) for code in range(-127, 128)], "codes"


def _placed(weight: Tensor, scales: Tensor, minimums: Tensor | None) -> tuple[Tensor, Tensor]:
    groups = weight.view(*scales.shape, -1)
    if minimums is not None:
        groups = groups - minimums.float()[:, :, None]
    wide = scales.float()[:, :, None]
    return groups / wide, wide


def _decoder_config(source: ModelSource) -> DecoderConfig:
    from backend.models.dummy import DUMMY_SHAPES
    from backend.models.model_config import load_decoder_config

    return DUMMY_SHAPES[source.shape or ""] if source.path is None else load_decoder_config(source.path)


def _weight(source: ModelSource, config: DecoderConfig, layer: int, module: str) -> Tensor:
    """float32 [out_features, in_features], as a loaded model has it."""
    import torch

    from backend.layers.linear import Linear
    from backend.models.checkpoint import Checkpoint
    from backend.models.dummy import fill_with_random_weights
    from backend.models.weight_slots import layer_linears

    merged = layer_linears(config)[module]
    if source.path is None:
        linear = Linear(
            merged.in_features,
            sum(merged.projections.values()),
            bias=False,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        fill_with_random_weights(linear, prefix=f"layers.{layer}.{module}")
        assert linear.weight is not None
        return linear.weight.data
    with Checkpoint(source.path) as checkpoint:
        return torch.cat(
            [checkpoint.tensor(f"model.layers.{layer}.{name}.weight").float() for name in merged.projections]
        )
