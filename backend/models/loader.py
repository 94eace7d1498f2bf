"""From a model source to a decoder on its device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from backend.config import QuantizationSettings
from backend.errors import CapacityError, ConfigError, ModelError
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.checkpoint import Checkpoint
from backend.models.decoder import Decoder
from backend.models.dummy import DUMMY_SHAPES, fill_with_random_weights
from backend.models.layer_quantizer import LayerQuantizer
from backend.models.model_config import DecoderConfig, load_decoder_config
from backend.models.sources import ModelSource
from backend.models.stored_layers import StoredLayers
from backend.models.weight_slots import (
    EMBEDDING,
    HEAD,
    REDUNDANT_SUFFIX,
    check_slots,
    linear_slots,
    listed,
    weight_slots,
)
from backend.quantization.formats.scheme import HEAD as HEAD_NAME

ProgressCallback = Callable[[float, float], None]  # bytes done, bytes in all

NOT_QUANTIZED = QuantizationSettings()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder ready to run, and how it was loaded.

    Attributes:
        weights_bytes: of all weights as they lie on the device; shared parameters count once.
        quantization: with defaults filled in; nothing of a checkpoint that is quantized already.
        num_quantized_layers: linear layers whose weights are packed, the head not counted.
        unquantized_layers: those that `quantization.skip` or such a checkpoint left as they are, by their names in the decoder.
        emulated_quantization: some packed weight is multiplied by a reference, so that the model's speed says nothing.
    """

    model: Decoder
    config: DecoderConfig
    num_parameters: int
    weights_bytes: int
    load_seconds: float
    notices: tuple[str, ...]
    quantization: QuantizationSettings
    num_quantized_layers: int
    unquantized_layers: tuple[str, ...]
    emulated_quantization: bool


def load_model(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: QuantizationSettings = NOT_QUANTIZED,
    on_progress: ProgressCallback | None = None,
) -> LoadedModel:
    """Build the decoder of `source` with its weights in `dtype`, or quantized, on `device`.

    Args:
        on_progress: called with the bytes copied so far and the bytes to copy.
    Raises:
        ConfigError: the quantization does not fit the model, or the checkpoint is quantized already.
        ModelError: a file is missing, truncated or foreign, or the files disagree.
        CapacityError: the device has too little free memory for the weights.
    """
    start = time.perf_counter()
    report = on_progress or (lambda done, total: None)
    if source.kind == "dummy":
        assert source.shape is not None
        config = DUMMY_SHAPES[source.shape]
        quantizer = LayerQuantizer(config, quantization, dtype) if quantization.method else None
        model, notices = _build(config, dtype, device, quantizer), []
        fill_with_random_weights(model)
        for path, dense, _ in quantizer.dense_layers(model, device) if quantizer else ():
            fill_with_random_weights(dense, prefix=path)
    else:
        assert source.path is not None
        model, quantizer, notices = _load_checkpoint(source.path, dtype, device, quantization, report)
    if isinstance(quantizer, LayerQuantizer):
        quantizer.quantize_head(model)
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.prepare()
    packed = [module.packed for module in model.modules() if isinstance(module, QuantizedLinear)]
    weights_bytes += sum(weight.nbytes for weight in packed)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    report(weights_bytes, weights_bytes)
    return LoadedModel(
        model=model.eval(),
        config=model.config,
        num_parameters=model.config.count_parameters(),
        weights_bytes=weights_bytes,
        load_seconds=time.perf_counter() - start,
        notices=(*notices, *(quantizer.notices if quantizer else ())),
        quantization=quantizer.settings if quantizer else quantization,
        num_quantized_layers=sum(isinstance(module, QuantizedLinear) for module in model.layers.modules()),
        unquantized_layers=quantizer.skipped if quantizer else (),
        emulated_quantization=any(weight.emulated for weight in packed),
    )


def _build(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device, quantizer: LayerQuantizer | StoredLayers | None
) -> Decoder:
    """A decoder with uninitialised parameters, after checking that they fit: a CPU would swap or be killed instead.

    Linear layers that are to be quantized take no memory yet.
    """
    needed = quantizer.count_bytes(config) if quantizer else config.count_parameters() * dtype.itemsize
    free = _free_bytes(device)
    if needed > free:
        kept = _name(dtype)
        if quantizer:
            method = quantizer.description if isinstance(quantizer, StoredLayers) else quantizer.settings.method
            kept = f"{method} and {kept}"
        raise CapacityError(
            f"the weights need {needed / 2**30:.1f} GiB in {kept}, and {device.type} memory has "
            f"{free / 2**30:.1f} GiB free; choose a smaller model or dtype"
        )
    meta = torch.device("meta")
    stores_head = isinstance(quantizer, StoredLayers) and quantizer.has_head
    return Decoder(
        config,
        dtype=dtype,
        device=device,
        linear_device=meta if quantizer else None,
        head_device=meta if stores_head else None,
    )


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return psutil.virtual_memory().available
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _load_checkpoint(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizationSettings,
    report: ProgressCallback,
) -> tuple[Decoder, LayerQuantizer | StoredLayers | None, list[str]]:
    config = load_decoder_config(folder)
    with Checkpoint(folder) as checkpoint:
        config, notices = _resolve_tie(config, checkpoint)
        quantizer = _quantizer(config, quantization, checkpoint, dtype)
        packed = quantizer.stored if isinstance(quantizer, StoredLayers) else set()
        model = _build(config, dtype, device, quantizer)
        slots = {name: slot for name, slot in weight_slots(model).items() if name not in packed}
        stored = check_slots(checkpoint, slots)
        if dtype == torch.float16 and "bfloat16" in stored:
            notices.append(
                "the checkpoint is bfloat16: in float16 values above 65,504 overflow and the output turns "
                "non-finite; bfloat16 and float32 are safe"
            )
        copy = _WeightCopy(checkpoint, slots, report)
        copy({name: slot for name, slot in slots.items() if not slot.is_meta})
        for _, dense, projections in quantizer.dense_layers(model, device) if quantizer else ():
            copy(linear_slots(dense, projections))
        zeros = quantizer.zero_biases if isinstance(quantizer, StoredLayers) else set()
        known = {*slots, *packed, *zeros, *([HEAD] if config.tie_word_embeddings else [])}
        unused = [name for name in checkpoint.names if name not in known and not name.endswith(REDUNDANT_SUFFIX)]
    if unused:
        notices.append(f"the model does not use these tensors of the checkpoint: {listed(unused)}")
    return model, quantizer, notices


def _quantizer(
    config: DecoderConfig, quantization: QuantizationSettings, checkpoint: Checkpoint, dtype: torch.dtype
) -> LayerQuantizer | StoredLayers | None:
    if config.stored_quantization is None:
        return LayerQuantizer(config, quantization, dtype) if quantization.method else None
    layers = StoredLayers(config, config.stored_quantization, checkpoint, dtype)
    if quantization.method or quantization.head:
        asked = f"method = {quantization.method!r}" if quantization.method else f"head = {quantization.head!r}"
        raise ConfigError(
            f"quantization.{asked}, but {checkpoint.folder} is quantized already "
            f"({layers.description}); allowed for it: None"
        )
    return layers


def _resolve_tie(config: DecoderConfig, checkpoint: Checkpoint) -> tuple[DecoderConfig, list[str]]:
    """A head that is stored beside the embedding it is tied to, and differs from it, was meant: untie, as transformers.

    An equal one stays tied. One that is stored quantized is a weight of its own, whatever config.json says.
    """
    if config.stored_quantization is not None and config.stored_quantization.scheme_of(HEAD_NAME) is not None:
        return replace(config, tie_word_embeddings=False), []
    if not config.tie_word_embeddings or HEAD not in checkpoint or EMBEDDING not in checkpoint:
        return config, []
    if torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING)):
        return config, []
    notice = f"config.json ties the output head to the embedding, but the checkpoint has a different {HEAD}: it is used, untied"
    return replace(config, tie_word_embeddings=False), [notice]


class _WeightCopy:
    """Copies tensors from their mapped files into slots on the device, converting on the way, and says how far it is."""

    def __init__(self, checkpoint: Checkpoint, slots: dict[str, torch.Tensor], report: ProgressCallback) -> None:
        self._checkpoint = checkpoint
        self._report = report
        self._sizes = {name: slot.nbytes for name, slot in slots.items()}
        self._done, self._total = 0, sum(self._sizes.values())

    def __call__(self, slots: dict[str, torch.Tensor]) -> None:
        for name, slot in slots.items():
            slot.copy_(self._checkpoint.tensor(name))
            if slot.dtype == torch.float16 and not slot.isfinite().all():
                raise ModelError(
                    f"{self._checkpoint.path(name)}: {name} has values that float16 cannot hold (above 65,504); "
                    "allowed for this model: bfloat16, float32"
                )
            self._done += self._sizes[name]
            self._report(self._done, self._total)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
