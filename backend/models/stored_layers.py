"""`StoredLayers`: puts the layers of a quantized checkpoint into a decoder as they are stored, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from backend.config import QuantizationSettings
from backend.errors import ModelError
from backend.layers.linear import Linear
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.checkpoint import Checkpoint
from backend.models.decoder import Decoder
from backend.models.model_config import DecoderConfig
from backend.models.weight_slots import MergedLinear, layer_linears
from backend.quantization.base import PackedWeight
from backend.quantization.formats import awq_gemm, compressed_tensors, gptq_v1
from backend.quantization.formats.compressed_tensors import join_rows
from backend.quantization.formats.grids import ReadTensor
from backend.quantization.formats.scheme import HEAD, Format, StoredQuantization, StoredScheme

_SUFFIXES = (
    *("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),  # compressed-tensors'
    *("qweight", "qzeros", "scales", "g_idx"),  # AutoAWQ's and AutoGPTQ's
)
_DECODERS: dict[Format, Callable[[str, ReadTensor, StoredScheme, tuple[int, int]], PackedWeight]] = {
    "awq-gemm": awq_gemm.decode,
    "gptq-v1": gptq_v1.decode,
}


class StoredLayers:
    """For one load, in the place of a `LayerQuantizer`.

    `has_head` says whether the output head is among the layers; `skipped` names modules that are stored as they are; `stored` the
    weights' tensors of the others, which this reads itself;
    `zero_biases`, once the layers are read, those that the checkpoint has and the model does without.
    """

    settings = QuantizationSettings()  # nothing is quantized here

    def __init__(
        self, config: DecoderConfig, stored: StoredQuantization, checkpoint: Checkpoint, dtype: torch.dtype
    ) -> None:
        """Raise `ModelError` where projections of one input are stored in different ways.

        A head that is stored quantized is one of the layers; otherwise it is none of them.

        Args:
            dtype: of the layers that stay as they are, and of biases.
        """
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._linears: dict[str, tuple[MergedLinear, StoredScheme | None]] = {}
        for index in range(config.num_layers):
            for module, merged in layer_linears(config).items():
                names = {f"model.layers.{index}.{name}": rows for name, rows in merged.projections.items()}
                schemes = {name: stored.scheme_of(name) for name in names}
                if len(set(schemes.values())) > 1:
                    said = "; ".join(f"{name}: {scheme or 'not quantized'}" for name, scheme in schemes.items())
                    raise ModelError(
                        f"{checkpoint.folder}: projections of one input have to be stored alike, and are not: {said}"
                    )
                self._linears[f"layers.{index}.{module}"] = (
                    MergedLinear(merged.in_features, names),
                    next(iter(schemes.values())),
                )
        head = stored.scheme_of(HEAD)
        self.has_head = head is not None
        if head is not None:
            self._linears["head"] = (MergedLinear(config.hidden_size, {HEAD: config.vocab_size}), head)
        self.skipped = tuple(path for path, (_, scheme) in self._linears.items() if scheme is None)
        self.stored = {
            f"{name}.{suffix}"
            for merged, scheme in self._linears.values()
            if scheme is not None
            for name in merged.projections
            for suffix in _SUFFIXES
        }
        self.description = str(stored)
        self.notices: tuple[str, ...] = ()
        self.zero_biases: set[str] = set()

    def count_bytes(self, config: DecoderConfig) -> int:
        """What the decoder's parameters take, scales aside, and the largest layer's codes beside them as they are read."""
        sizes = {
            path: merged.in_features * sum(merged.projections.values()) for path, (merged, _) in self._linears.items()
        }
        packed = {path: scheme.bits for path, (_, scheme) in self._linears.items() if scheme is not None}
        others = config.count_parameters() - sum(sizes[path] for path in packed)
        codes = sum(sizes[path] * bits // 8 for path, bits in packed.items())
        return others * self._dtype.itemsize + codes + max((sizes[path] for path in packed), default=0)

    def dense_layers(self, model: Decoder, device: torch.device) -> Iterator[tuple[str, Linear, dict[str, int]]]:
        """As `LayerQuantizer.dense_layers`, but that a layer stored quantized has only its bias to be filled.

        Raises `ModelError` for tensors that are missing or not of their shape.
        """
        for path, (merged, scheme) in self._linears.items():
            place = model.get_submodule(path)
            assert isinstance(place, Linear)
            has_bias = place.bias is not None
            shape = (place.in_features, place.out_features)
            if scheme is None:
                dense = Linear(*shape, bias=has_bias, dtype=self._dtype, device=device)
                yield path, dense, merged.projections
                model.set_submodule(path, dense)
            else:
                bias = (
                    nn.Parameter(torch.empty(shape[1], dtype=self._dtype, device=device), False) if has_bias else None
                )
                without_weight = Linear(*shape, bias=False, dtype=self._dtype, device=torch.device("meta"))
                without_weight.weight, without_weight.bias = None, bias
                yield path, without_weight, merged.projections
                if not has_bias:
                    self._check_zero_biases(merged)
                packed = self._packed(merged, scheme).to(str(device))
                model.set_submodule(path, QuantizedLinear(packed, bias))

    def _packed(self, merged: MergedLinear, scheme: StoredScheme) -> PackedWeight:
        decode = _DECODERS.get(scheme.format, compressed_tensors.decode)
        weights = [
            decode(name, self._read, scheme, (rows, merged.in_features)) for name, rows in merged.projections.items()
        ]
        try:
            return join_rows(weights)
        except ValueError:
            raise ModelError(
                f"{self._checkpoint.folder}: the groups (g_idx, desc_act) of {', '.join(merged.projections)} lie in "
                "different orders; projections of one input have to be stored alike"
            ) from None

    def _check_zero_biases(self, merged: MergedLinear) -> None:
        """AutoGPTQ stores a bias of zeros where the model has none."""
        for name in merged.projections:
            bias = f"{name}.bias"
            if bias in self._checkpoint:
                if self._checkpoint.tensor(bias).any():
                    raise ModelError(
                        f"{self._checkpoint.path(bias)}: {bias} is not 0, and by config.json there is none"
                    )
                self.zero_biases.add(bias)

    def _read(self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        if name not in self._checkpoint:
            raise ModelError(f"{self._checkpoint.folder}: the checkpoint lacks {name}")
        tensor = self._checkpoint.tensor(name)
        if tensor.dtype not in dtypes:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            found = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{self._checkpoint.path(name)}: {name} has dtype {found} instead of {allowed}")
        if tuple(tensor.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelError(
                f"{self._checkpoint.path(name)}: {name} has shape {list(tensor.shape)} instead of {wanted}"
            )
        return tensor
