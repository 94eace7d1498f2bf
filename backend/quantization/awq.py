"""`awq`: rounding to nearest after inputs that matter most have been made finer, by scales that the layer before undoes.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023, arXiv:2306.00978. Errors are
those of a linear layer's outputs over all calibration tokens, exact by the Hessian of its inputs; the authors' program takes
a sample of tokens, and for some layers the outputs of the block around them.

Where the scales go: those of queries, keys and values and of gate and up into the norm before; of down into the rows of up;
of the output projection into the rows of values. The query heads of a KV head share its values, so that there they have one
scale for each of its channels, by their mean activation.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from backend.layers.linear import Linear
from backend.models.decoder import DecoderLayer
from backend.models.model_config import DecoderConfig
from backend.quantization.calibration import InputStats
from backend.quantization.group_size import CHANNEL
from backend.quantization.int_weight import IntWeight, ZeroPoint, fit_grid, quantize_by_rounding, round_to_grid

_STEPS = 20  # of the exponent alpha from 0 to 1
_MAX_RATIO = 1e4  # of the most to the least active input: scales stay within a hundred times either way
_CLIP_STEPS = 10
_LEAST_CLIP = 0.5  # of a group's range


class AWQ:
    """For one layer at a time: `scale` it, then `quantize` its linear layers as they are then."""

    def __init__(self, config: DecoderConfig, bits: int, group_size: int, zero_point: ZeroPoint) -> None:
        self._config = config
        self._grid = (bits, group_size, zero_point)

    def scale(
        self, layer: DecoderLayer, stats: dict[str, InputStats], modules: Collection[str]
    ) -> dict[str, InputStats]:
        """Change a float32 layer so that it computes the same and its rounded weights err less.

        Args:
            stats: of the inputs of all its linear layers, by their names in it.
            modules: those that are to be quantized; the others' inputs get no scales.
        Returns:
            the statistics of the inputs as they are now.
        """
        config = self._config
        attention, mlp = layer.attention, layer.mlp
        kv_size = config.num_kv_heads * config.head_dim
        stats = dict(stats)
        # An MLP's and an attention's last layer first: its scales change weights of the one before.
        if "mlp.down" in modules:
            scales = self._find_scales(mlp.down, stats["mlp.down"])
            _divide_rows(mlp.gate_up, config.intermediate_size, scales)
            stats["mlp.down"] = _multiply_columns(mlp.down, scales, stats["mlp.down"])
        if "mlp.gate_up" in modules:
            scales = self._find_scales(mlp.gate_up, stats["mlp.gate_up"])
            layer.mlp_norm.weight.data.div_(scales)
            stats["mlp.gate_up"] = _multiply_columns(mlp.gate_up, scales, stats["mlp.gate_up"])
        if "attention.output" in modules:
            scales = self._find_scales(attention.output, stats["attention.output"], shares_values=True)
            by_value = scales.view(config.num_kv_heads, -1, config.head_dim)[:, 0].flatten()
            _divide_rows(attention.qkv, kv_size, by_value)
            stats["attention.output"] = _multiply_columns(attention.output, scales, stats["attention.output"])
        if "attention.qkv" in modules:
            scales = self._find_scales(attention.qkv, stats["attention.qkv"])
            layer.attention_norm.weight.data.div_(scales)
            stats["attention.qkv"] = _multiply_columns(attention.qkv, scales, stats["attention.qkv"])
        return stats

    def quantize(self, module: str, weight: Tensor, stats: InputStats) -> IntWeight:
        """Round to nearest, each group's range narrowed where that errs less.

        Not of queries and keys: their products err otherwise than their outputs do.
        """
        if module != "attention.qkv":
            return quantize_by_rounding(clip_groups(weight, stats.hessian, *self._grid), *self._grid)
        kv_size = self._config.num_kv_heads * self._config.head_dim
        values = clip_groups(weight[-kv_size:], stats.hessian, *self._grid)
        return quantize_by_rounding(torch.cat((weight[:-kv_size], values)), *self._grid)

    def _find_scales(self, linear: Linear, stats: InputStats, *, shares_values: bool = False) -> Tensor:
        assert linear.weight is not None
        activity = stats.mean_abs
        if shares_values:
            by_head = activity.view(self._config.num_kv_heads, -1, self._config.head_dim)
            activity = by_head.mean(1, keepdim=True).expand_as(by_head).flatten()
        return find_scales(linear.weight.data, activity, stats, *self._grid)


def find_scales(
    weight: Tensor, activity: Tensor, stats: InputStats, bits: int, group_size: int, zero_point: ZeroPoint
) -> Tensor:
    """The scales `activity ** alpha` of inputs, float32 [in_features], whose weights times them are best rounded.

    Args:
        weight: float32 [out_features, in_features].
        activity: float32 [in_features], mean |x|; alpha = 0 leaves the weights as they are.
    """
    most = activity.max()
    best, least_error = torch.ones_like(activity), float("inf")
    if most == 0:
        return best
    for step in range(_STEPS + 1):
        scales = activity.clamp(min=most / _MAX_RATIO) ** (step / _STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = rounded_values(weight * scales, bits, group_size, zero_point) / scales
        error = stats.squared_error(rounded - weight)
        if error < least_error:
            best, least_error = scales, error
    return best


def clip_groups(weight: Tensor, hessian: Tensor, bits: int, group_size: int, zero_point: ZeroPoint) -> Tensor:
    """Weights moved into a part of their group's range, of half to all of it, by which the group's share of outputs errs least.

    Args:
        weight: float32 [out_features, in_features].
        hessian: float32 [in_features, in_features]; what groups have in common is left out.
    """
    size = weight.shape[1] if group_size == CHANNEL else group_size
    groups = weight.unflatten(1, (-1, size))  # [out_features, num_groups, size]
    indices = torch.arange(weight.shape[1], device=weight.device).view(-1, size)
    own = hessian[indices[:, :, None], indices[:, None, :]]  # [num_groups, size, size]
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    best, least_error = groups, torch.full_like(low, float("inf"))
    for step in range(_CLIP_STEPS + 1):
        part = 1 - (1 - _LEAST_CLIP) * step / _CLIP_STEPS
        clipped = groups.clamp(low * part, high * part)
        rounded = rounded_values(clipped.flatten(1), bits, group_size, zero_point)
        difference = (rounded.view_as(groups) - groups).transpose(0, 1)
        error = ((difference @ own) * difference).sum(2).t()[:, :, None]
        best = torch.where(error < least_error, clipped, best)
        least_error = torch.minimum(error, least_error)
    return best.flatten(1)


def rounded_values(weight: Tensor, bits: int, group_size: int, zero_point: ZeroPoint) -> Tensor:
    """What `quantize_by_rounding` would store of a float32 weight, dequantized: most of its time is packing codes."""
    grid = fit_grid(weight, bits, group_size, zero_point)
    codes = round_to_grid(weight, grid, bits).view(*grid.scales.shape, -1).float()
    scales = grid.scales.float()[:, :, None]
    if grid.minimums is not None:
        return (codes * scales + grid.minimums.float()[:, :, None]).flatten(1)
    zeros = float(1 << (bits - 1)) if grid.zeros is None else grid.zeros.float()[:, :, None]
    return ((codes - zeros) * scales).flatten(1)


def _divide_rows(linear: Linear, num_rows: int, scales: Tensor) -> None:
    """The last rows, of the projection that lies last."""
    assert linear.weight is not None
    linear.weight.data[-num_rows:].div_(scales[:, None])
    if linear.bias is not None:
        linear.bias.data[-num_rows:].div_(scales)


def _multiply_columns(linear: Linear, scales: Tensor, stats: InputStats) -> InputStats:
    assert linear.weight is not None
    linear.weight.data.mul_(scales)
    return stats.scaled(scales)
