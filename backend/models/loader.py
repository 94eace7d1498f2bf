"""From a model source to a decoder on its device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from backend.errors import CapacityError, ModelError
from backend.models.checkpoint import Checkpoint
from backend.models.decoder import Decoder
from backend.models.dummy import DUMMY_SHAPES, fill_with_random_weights
from backend.models.model_config import DecoderConfig, load_decoder_config
from backend.models.sources import ModelSource
from backend.models.weight_slots import EMBEDDING, HEAD, REDUNDANT_SUFFIX, weight_slots

ProgressCallback = Callable[[float, float], None]  # bytes done, bytes in all

_MAX_NAMES_IN_MESSAGE = 8


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder ready to run, and how it was loaded. `weights_bytes` counts shared parameters once."""

    model: Decoder
    config: DecoderConfig
    num_parameters: int
    weights_bytes: int
    load_seconds: float
    notices: tuple[str, ...]


def load_model(
    source: ModelSource, *, device: torch.device, dtype: torch.dtype, on_progress: ProgressCallback | None = None
) -> LoadedModel:
    """Build the decoder of `source` with its weights in `dtype` on `device`.

    Args:
        on_progress: called with the bytes copied so far and the bytes to copy.
    Raises:
        ModelError: a file is missing, truncated or foreign, or the files disagree.
        CapacityError: the device has too little free memory for the weights.
    """
    start = time.perf_counter()
    report = on_progress or (lambda done, total: None)
    if source.kind == "dummy":
        assert source.shape is not None
        model, notices = _build(DUMMY_SHAPES[source.shape], dtype, device), []
        fill_with_random_weights(model)
    else:
        assert source.path is not None
        model, notices = _load_checkpoint(source.path, dtype, device, report)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.prepare()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    report(weights_bytes, weights_bytes)
    return LoadedModel(
        model=model.eval(),
        config=model.config,
        num_parameters=num_parameters,
        weights_bytes=weights_bytes,
        load_seconds=time.perf_counter() - start,
        notices=tuple(notices),
    )


def _build(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder with uninitialised parameters, after checking that they fit: a CPU would swap or be killed instead."""
    needed = config.count_parameters() * dtype.itemsize
    free = _free_bytes(device)
    if needed > free:
        raise CapacityError(
            f"the weights need {needed / 2**30:.1f} GiB in {_name(dtype)}, and {device.type} memory has "
            f"{free / 2**30:.1f} GiB free; choose a smaller model or dtype"
        )
    return Decoder(config, dtype=dtype, device=device)


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return psutil.virtual_memory().available
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _load_checkpoint(
    folder: Path, dtype: torch.dtype, device: torch.device, report: ProgressCallback
) -> tuple[Decoder, list[str]]:
    config = load_decoder_config(folder)
    with Checkpoint(folder) as checkpoint:
        config, notices = _resolve_tie(config, checkpoint)
        model = _build(config, dtype, device)
        slots = weight_slots(model)
        if missing := [name for name in slots if name not in checkpoint]:
            hint = " (tie_word_embeddings is not true in config.json)" if HEAD in missing else ""
            raise ModelError(f"{folder}: the checkpoint lacks {_listed(missing)}{hint}")
        for name, slot in slots.items():
            if checkpoint.shape(name) != tuple(slot.shape):
                raise ModelError(
                    f"{checkpoint.path(name)}: {name} has shape {list(checkpoint.shape(name))}, "
                    f"and config.json asks for {list(slot.shape)}"
                )
        stored = {checkpoint.dtype(name) for name in slots}
        if dtype == torch.float16 and "bfloat16" in stored:
            notices.append(
                "the checkpoint is bfloat16: in float16 values above 65,504 overflow and the output turns "
                "non-finite; bfloat16 and float32 are safe"
            )
        _copy_weights(checkpoint, slots, report)
        known = {*slots, *([HEAD] if config.tie_word_embeddings else [])}
        unused = [name for name in checkpoint.names if name not in known and not name.endswith(REDUNDANT_SUFFIX)]
    if unused:
        notices.append(f"the model does not use these tensors of the checkpoint: {_listed(unused)}")
    return model, notices


def _resolve_tie(config: DecoderConfig, checkpoint: Checkpoint) -> tuple[DecoderConfig, list[str]]:
    """A head that is stored beside the embedding it is tied to, and differs from it, was meant: untie, as transformers.

    An equal one stays tied.
    """
    if not config.tie_word_embeddings or HEAD not in checkpoint or EMBEDDING not in checkpoint:
        return config, []
    if torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING)):
        return config, []
    notice = f"config.json ties the output head to the embedding, but the checkpoint has a different {HEAD}: it is used, untied"
    return replace(config, tie_word_embeddings=False), [notice]


def _copy_weights(checkpoint: Checkpoint, slots: dict[str, torch.Tensor], report: ProgressCallback) -> None:
    """Copy each tensor from its mapped file into its slot on the device, converting on the way."""
    total = sum(slot.nbytes for slot in slots.values())
    done = 0
    for name, slot in slots.items():
        slot.copy_(checkpoint.tensor(name))
        if slot.dtype == torch.float16 and not slot.isfinite().all():
            raise ModelError(
                f"{checkpoint.path(name)}: {name} has values that float16 cannot hold (above 65,504); "
                "allowed for this model: bfloat16, float32"
            )
        done += slot.nbytes
        report(done, total)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_IN_MESSAGE])
    hidden = len(names) - _MAX_NAMES_IN_MESSAGE
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
