"""Quantized layers set beside those that they were made of, scales taken out that were folded into what comes before.

AWQ multiplies the inputs of a layer that matter most and has the layer before divide by as much (`backend.quantization.awq`):
the norm before queries, keys and values and before gate and up, the rows of the values for the attention's output, the rows
of up for down. With these scales taken out on both sides, a layer computes what the one that it was made of does, but for
rounding.

Those folded into a norm are the quotient of the norms' weights, exactly. Those of the values' and up's rows are not stored
by themselves: of a row q of a layer, and w of the reference, r = |w|^2 / (q w). That is r but for the part of the rounding
errors that lies along w: with independent errors of 10 % in 576 inputs, 0.4 %, which in an error of 10 % is not seen.

No torch at module level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from backend.layers.quantized_linear import QuantizedLinear
    from backend.models.decoder import Decoder, DecoderLayer

_SAME_NORM = 2**-7  # of a weight, between bfloat16 and float32
_SCALED_ROWS = 0.1  # from 1 in the median: rounding alone moves a row's scale far less
_LEAST_COSINE = 0.5  # of weights in 2 bits and those they were made of; of unrelated ones it is 0


def differing_norm(decoder: Decoder, reference: Decoder) -> str | None:
    """The first norm whose weights are not the reference's."""
    import torch

    others = dict(reference.named_parameters())
    for name, weight in decoder.named_parameters():
        if name.endswith("norm.weight") and not torch.allclose(weight, others[name], rtol=_SAME_NORM, atol=0):
            return name
    return None


def unfolded_layers(
    decoder: Decoder, reference: Decoder, dense: Callable[[nn.Module], Tensor]
) -> dict[str, QuantizedLinear]:
    """The quantized layers of a decoder by their names in it, to stand in the place of the reference's.

    Args:
        reference: of the same shapes.
        dense: gives the float32 matrix of a linear layer.
    Raises:
        ConfigError: a layer has little in common with the reference's.
    """
    from backend.layers.quantized_linear import QuantizedLinear

    norms_differ = differing_norm(decoder, reference) is not None
    found = {}
    for index, (own, other) in enumerate(zip(decoder.layers, reference.layers, strict=True)):
        scales = _Scales(own, other, dense, norms_differ)  # type: ignore[arg-type]
        for name in scales.names:
            module = own.get_submodule(name)
            if isinstance(module, QuantizedLinear):
                found[f"layers.{index}.{name}"] = scales.unfold(name, module)
    return found


class _Scales:
    """Of one layer: by which its linear modules' inputs and outputs are scaled beside the reference's."""

    names = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")

    def __init__(
        self, own: DecoderLayer, other: DecoderLayer, dense: Callable[[nn.Module], Tensor], norms_differ: bool
    ) -> None:
        self._own = {name: dense(own.get_submodule(name)) for name in self.names}
        self._other = {name: dense(other.get_submodule(name)) for name in self.names}
        qkv, gate_up = self.names[0], self.names[2]
        inputs = {name: weight.new_ones(weight.shape[1]) for name, weight in self._other.items()}
        if norms_differ:
            inputs[qkv] = _quotient(other.attention_norm.weight, own.attention_norm.weight)
            inputs[gate_up] = _quotient(other.mlp_norm.weight, own.mlp_norm.weight)
        self._inputs = inputs
        self._outputs = {name: weight.new_ones(weight.shape[0]) for name, weight in self._other.items()}
        head_dim, (num_heads, num_kv_heads, _) = own.attention.head_dim, own.attention.head_counts
        values = self._rows(qkv, num_kv_heads * head_dim, norms_differ)
        by_head = values.view(num_kv_heads, 1, head_dim)
        inputs["attention.output"] = by_head.expand(-1, num_heads // num_kv_heads, -1).flatten()
        inputs["mlp.down"] = self._rows(gate_up, self._other["mlp.down"].shape[1], norms_differ)

    def unfold(self, name: str, module: QuantizedLinear) -> QuantizedLinear:
        """The module where nothing is folded. Raises `ConfigError`."""
        from torch import nn
        from torch.nn import functional as F

        from backend.layers.quantized_linear import QuantizedLinear
        from backend.quantization.unfolded_weight import UnfoldedWeight

        inputs, outputs = self._inputs[name], self._outputs[name]
        unfolded = self._own[name] * outputs[:, None] / inputs
        likeness = F.cosine_similarity(unfolded.flatten(), self._other[name].flatten(), dim=0)
        if not likeness > _LEAST_COSINE:
            raise ConfigError(f"{name} has little in common with that of the reference: it is another model")
        if (inputs == 1).all() and (outputs == 1).all():
            return module
        bias = None if module.bias is None else nn.Parameter((module.bias * outputs).to(module.bias.dtype), False)
        return QuantizedLinear(UnfoldedWeight(module.packed, inputs, outputs), bias)

    def _rows(self, name: str, num_rows: int, norms_differ: bool) -> Tensor:
        """By what the last rows of a module are divided, float32 [num_rows]; they become its outputs' scales."""
        rows = (self._own[name] / self._inputs[name])[-num_rows:]
        others = self._other[name][-num_rows:]
        along = (rows * others).sum(1)
        scales = (others.square().sum(1) / along).where(along != 0, 1.0)
        if not norms_differ and (scales - 1).abs().median() < _SCALED_ROWS:
            scales = scales.new_ones(num_rows)
        self._outputs[name][-num_rows:] = scales
        return scales


def _quotient(weights: Tensor, divisors: Tensor) -> Tensor:
    """float32, 1 where both are 0."""
    weights, divisors = weights.float(), divisors.float()
    return (weights / divisors).where(weights != divisors, 1.0)
