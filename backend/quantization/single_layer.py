"""`SingleLayer`: a decoder layer in float32 that takes the weights of one layer of a checkpoint after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from backend.layers.linear import Linear
from backend.models.decoder import Decoder, DecoderLayer
from backend.models.model_config import DecoderConfig
from backend.models.weight_slots import layer_linears, weight_slots
from backend.quantization.base import PackedWeight, check_finite
from backend.quantization.formats.compressed_tensors import cut_rows, decode, encode
from backend.quantization.formats.scheme import StoredScheme


class SingleLayer:
    """`layer` is the module; `linears` name its linear ones, each with its number of inputs."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        decoder = Decoder(replace(config, num_layers=1), dtype=torch.float32, device=torch.device("meta"))
        layer = decoder.layers[0].to_empty(device=device).eval()
        assert isinstance(layer, DecoderLayer)
        self.layer = layer
        self._merged = layer_linears(config)
        self.linears = {module: merged.in_features for module, merged in self._merged.items()}
        prefix = layer_prefix(0)
        self._slots = {
            name.removeprefix(prefix): slot for name, slot in weight_slots(decoder).items() if name.startswith(prefix)
        }
        self._device = device

    def linear(self, module: str) -> Linear:
        linear = self.layer.get_submodule(module)
        assert isinstance(linear, Linear)
        return linear

    def projections(self, module: str) -> tuple[str, ...]:
        """Those side by side in a linear module, by their names in a layer of a checkpoint."""
        return tuple(self._merged[module].projections)

    def weight(self, module: str) -> Tensor:
        """float32 [out_features, in_features], the layer's own."""
        weight = self.linear(module).weight
        assert weight is not None
        return weight.data

    def load(self, index: int, read: Callable[[str], Tensor]) -> None:
        """Raise `ModelError` for weights that are not finite."""
        for name, slot in self._slots.items():
            slot.copy_(read(layer_prefix(index) + name))
            check_finite(layer_prefix(index) + name, slot)

    def encode(
        self,
        index: int,
        packed: Mapping[str, PackedWeight],
        scheme: StoredScheme,
        dtype_of: Callable[[str], torch.dtype],
    ) -> dict[str, Tensor]:
        """The layer's tensors as a checkpoint holds them, on the CPU.

        Args:
            packed: linear module -> its weight; the others are stored as they are.
            dtype_of: of a tensor of the checkpoint.
        """
        tensors = {}
        for module, weight in packed.items():
            projections = self._merged[module].projections
            for name, part in zip(projections, cut_rows(weight, list(projections.values())), strict=True):
                prefix = f"{layer_prefix(index)}{name}."
                tensors |= {prefix + suffix: tensor for suffix, tensor in encode(part, scheme).items()}
        replaced = {f"{name}.weight" for module in packed for name in self._merged[module].projections}
        for name, slot in self._slots.items():
            if name not in replaced:
                full = layer_prefix(index) + name
                tensors[full] = slot.to("cpu", dtype_of(full), copy=True).contiguous()
        return tensors

    def encoded_bytes(self, index: int, module: str, tensors: Mapping[str, Tensor]) -> int:
        """Of a packed module's weights, scales and zero points in what `encode` gave."""
        prefixes = tuple(f"{layer_prefix(index)}{name}.weight" for name in self._merged[module].projections)
        return sum(
            tensor.nbytes
            for name, tensor in tensors.items()
            if name.startswith(prefixes) and not name.endswith("weight_shape")
        )

    def load_encoded(self, index: int, tensors: Mapping[str, Tensor], packed: Mapping[str, StoredScheme]) -> None:
        """What `encode` gave: as a loaded model computes with it, but for the rounding of activations.

        Args:
            packed: linear modules that are not stored as they are.
        """
        prefix = layer_prefix(index)
        schemes = {
            f"{name}.weight": (scheme, rows, self._merged[module].in_features)
            for module, scheme in packed.items()
            for name, rows in self._merged[module].projections.items()
        }
        for name, slot in self._slots.items():
            if name not in schemes:
                slot.copy_(tensors[prefix + name])
                continue
            scheme, rows, columns = schemes[name]
            projection = prefix + name.removesuffix(".weight")
            weight = decode(projection, lambda wanted, *_: tensors[wanted], scheme, (rows, columns))
            slot.copy_(weight.to(str(self._device)).dequantize())


def layer_prefix(index: int) -> str:
    """Of the names of a layer's tensors in a checkpoint."""
    return f"model.layers.{index}."
