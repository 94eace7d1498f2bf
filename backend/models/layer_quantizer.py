"""`LayerQuantizer`: puts quantized linear layers into a decoder while it is loaded, one after the other, and its head if asked.

Only one layer is ever held in full, so that a model loads where its weights in 16 bits would not fit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from backend.config import QuantizationSettings
from backend.layers.linear import Linear
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.decoder import Decoder
from backend.models.model_config import DecoderConfig
from backend.models.weight_slots import EMBEDDING, HEAD, MergedLinear, layer_linears
from backend.quantization.base import check_finite
from backend.quantization.int8 import Int8
from backend.quantization.int_weight import IntWeight
from backend.quantization.methods import choose_layers, make_method, resolve_settings

_HEAD_WEIGHTS_AT_ONCE = 2**24  # of the head: what packing holds beside them takes 20 times a weight's byte


class LayerQuantizer:
    """For one load. `settings` are resolved; `quantized` and `skipped` name modules; `notices` are for the user."""

    def __init__(self, config: DecoderConfig, settings: QuantizationSettings, dtype: torch.dtype) -> None:
        """Raise `ConfigError` for settings that do not fit the model.

        Args:
            dtype: of the layers that stay as they are, and of biases.
        """
        self._linears = {
            f"layers.{index}.{module}": MergedLinear(
                merged.in_features, {f"model.layers.{index}.{name}": rows for name, rows in merged.projections.items()}
            )
            for index in range(config.num_layers)
            for module, merged in layer_linears(config).items()
        }
        chosen = choose_layers(
            {path: tuple(merged.projections) for path, merged in self._linears.items()}, settings.skip
        )
        self.quantized, self.skipped, self.notices = chosen.quantized, chosen.skipped, chosen.notices
        self.settings = resolve_settings(
            settings,
            {
                name: self._linears[path].in_features
                for path in self.quantized
                for name in self._linears[path].projections
            },
        )
        method = make_method(self.settings)
        assert method is not None
        self._method = method
        self._dtype = dtype

    def count_bytes(self, config: DecoderConfig) -> int:
        """What the decoder's parameters take, scales aside, and the largest layer in full beside them."""
        sizes = {path: merged.in_features * sum(merged.projections.values()) for path, merged in self._linears.items()}
        others = config.count_parameters() - sum(sizes[path] for path in self.quantized)
        largest = max(sizes[path] for path in self.quantized)
        packed = sum(sizes[path] for path in self.quantized) * self._method.bits // 8
        head = config.vocab_size * config.hidden_size if self.settings.head else 0
        return others * self._dtype.itemsize + packed + head + largest * 4

    def dense_layers(self, model: Decoder, device: torch.device) -> Iterator[tuple[str, Linear, dict[str, int]]]:
        """Each linear layer in full, to be filled by the caller and then put into the model, packed or as it is.

        Gives its name in the model, the layer, and its projections as `linear_slots` takes them. Raises `ModelError` for
        weights that are not finite.
        """
        for path, (_, projections) in self._linears.items():
            place = model.get_submodule(path)
            assert isinstance(place, Linear)
            is_quantized = path in self.quantized
            dense = Linear(
                place.in_features,
                place.out_features,
                bias=place.bias is not None,
                dtype=torch.float32 if is_quantized else self._dtype,
                device=device,
            )
            yield path, dense, projections
            model.set_submodule(path, self._pack(dense, projections) if is_quantized else dense)

    def quantize_head(self, model: Decoder) -> None:
        """Put an int8 output head into a loaded model, where `settings.head` asks for one.

        A tied one is a copy: tokens are still looked up in the embedding as it is. Raises `ModelError` for weights that are
        not finite.
        """
        if self.settings.head is None:
            return
        is_tied = model.config.tie_word_embeddings
        weight = model.embedding if is_tied else model.head.weight
        assert weight is not None
        packed = quantize_head_weight(EMBEDDING if is_tied else HEAD, weight.data)
        model.set_submodule("head", QuantizedLinear(packed, None))
        if is_tied:
            self.notices += (head_copy_notice(weight.dtype, packed),)

    def _pack(self, dense: Linear, projections: dict[str, int]) -> QuantizedLinear:
        assert dense.weight is not None
        for name, rows in zip(projections, dense.weight.split(list(projections.values())), strict=True):
            check_finite(f"{name}.weight", rows)
        bias = None if dense.bias is None else nn.Parameter(dense.bias.to(self._dtype), requires_grad=False)
        return QuantizedLinear(self._method.quantize(dense.weight.data), bias)


def quantize_head_weight(name: str, weight: Tensor) -> IntWeight:
    """An output head in int8, a scale for each token. Raises `ModelError` naming it for weights that are not finite.

    Args:
        weight: float [vocab_size, hidden].
    """
    check_finite(name, weight)
    rows = max(1, _HEAD_WEIGHTS_AT_ONCE // weight.shape[1])
    return IntWeight.join([Int8().quantize(part) for part in weight.split(rows)])


def head_copy_notice(dtype: torch.dtype, packed: IntWeight) -> str:
    """What it takes that a head in int8 was tied to the embedding, which stays in `dtype`."""
    kept = str(dtype).removeprefix("torch.")
    return (
        f"the output head is an int8 copy of the embedding, which stays in {kept} for looking tokens up: "
        f"the two share nothing any more, which takes {packed.nbytes:,} bytes"
    )
