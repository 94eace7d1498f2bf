"""Checkpoints of the quantization lab: those that it makes by calibrated methods, kept among the models and used again, and
quantized models that are variants themselves. No torch at module level.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, cast

from backend.errors import ConfigError, ModelError
from backend.experiments.quantization_config import CALIBRATED, Variant
from backend.models.dummy import DUMMY_SHAPES
from backend.models.model_config import DecoderConfig, load_decoder_config
from backend.models.sources import ModelSource, list_models, resolve_source
from backend.models.store import building
from backend.paths import models_home

if TYPE_CHECKING:
    from backend.config import QuantizationSettings
    from backend.quantization.quantize_model import SavedMethod

NUM_WINDOWS = 16
WINDOW_LENGTH = 256
_FOLDER = ".quantized"  # hidden: a list of models does not show it
_SAVED = ("int8", "int4", "gptq", "awq", "w8a8_int8", "fp8")
# Of a config: what quantizing may change, and what generation alone asks for.
_NOT_SHAPE = ("tie_word_embeddings", "eos_token_ids", "checkpoint_dtype", "stored_quantization")

ProgressCallback = Callable[[int, int], None]  # layers done, layers in all


def why_not_saved(variant: Variant) -> str | None:
    """Why no checkpoint can be made of a variant, in a sentence; None where one can."""
    if variant.checkpoint is not None:
        return f"{variant.name} is a checkpoint already."
    if variant.method is None:
        return "There is none: a KV cache is no part of a checkpoint."
    if variant.method not in _SAVED:
        return f"There is none: the compressed-tensors format does not have {variant.method}."
    if variant.method in ("int4", *CALIBRATED) and (variant.quantization.zero_point or "float") == "float":
        return f"There is none: the format has no floating minimums; {variant.method}:zero_point=integer has one."
    return None


def saved_settings(variant: Variant) -> tuple[SavedMethod, QuantizationSettings]:
    """What `quantize_model` takes to make a variant's checkpoint. Raises `ConfigError` where none can be made."""
    from backend.quantization.quantize_model import grid_settings

    if problem := why_not_saved(variant):
        raise ConfigError(problem)
    method, grid = cast("SavedMethod", variant.method), variant.quantization
    settings = grid_settings(
        method,
        bits=grid.bits,
        group_size=grid.group_size,
        zero_point=grid.zero_point,
        granularity=grid.granularity,
        head=grid.head,
        skip=grid.skip,
    )
    return method, settings


def calibration_texts(path: str | None) -> list[str]:
    """Of a file, or of the one that ships. Raises `ConfigError`, see `read_texts`."""
    from backend.quantization.calibration import DEFAULT_TEXT, read_texts

    try:
        return read_texts(DEFAULT_TEXT if path is None else Path(path).expanduser())
    except RuntimeError:
        raise ConfigError(f"{path} cannot be read: no user has a home of this name") from None


def calibrated_checkpoint(
    source: ModelSource, variant: Variant, on_progress: ProgressCallback, calibration: str | None = None
) -> ModelSource:
    """The folder that `servelab quantize` would make with this many windows of the calibration text.

    Made on the first call; another process that makes the same is waited for. Layers of a call that was ended, by whatever
    means, lie beside the folder's place, and the next call goes on behind them.

    Args:
        calibration: see `calibration_texts`.
    Raises:
        ConfigError: the method does not fit the model, the model has no files, or the text cannot be read or is too short.
        ModelError: the model's files are damaged, or the folder cannot be written.
    """
    import torch

    from backend.quantization.calibration import cut_windows
    from backend.quantization.quantize_model import VERSION, fingerprint, quantize_model
    from backend.quantization.work_folder import WorkFolder
    from backend.tokenizer import load_tokenizer

    if source.path is None:
        raise ConfigError(
            f"{source.name} has no files to make a checkpoint of by {variant.method}; name a model that has"
        )
    method, settings = saved_settings(variant)
    texts = calibration_texts(calibration)
    length = min(WINDOW_LENGTH, load_decoder_config(source.path).max_position_embeddings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    what = [VERSION, method, settings.to_dict(), fingerprint(source), texts, NUM_WINDOWS, length, device.type]
    key = blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=6).hexdigest()
    name = f"{source.path.name}-{method}-{key}"
    output = models_home() / _FOLDER / name
    if not output.exists():
        # Only one process's turn is taken from `building`: the folder that it lends goes with whoever is killed.
        with building(name, lambda: on_progress(0, 1)):
            if not output.exists():
                tokenizer = load_tokenizer(source)
                token_ids = [id for text in texts for id in tokenizer.encode(text)]
                windows = cut_windows(token_ids, NUM_WINDOWS, length, 0)
                work = WorkFolder(output, force=False)
                quantize_model(source, method, settings, windows, work, device=device, on_progress=on_progress)
    return ModelSource(f"{source.name} in {method}", "folder", path=output)


def named_checkpoint(source: ModelSource, name: str) -> ModelSource:
    """A quantized model that can stand beside the model that it was made of, or one like it.

    Args:
        source: the lab's reference.
        name: of a stored model, or a folder.
    Raises:
        ModelError: there is none, or its files are damaged.
        ConfigError: it is not quantized, or not of the reference's architecture and shape.
    """
    checkpoint = resolve_source(name)
    if checkpoint.path is None or load_decoder_config(checkpoint.path).stored_quantization is None:
        raise ConfigError(f"{name} is not quantized: a variant is a method, or a model in fewer bits")
    own, other = load_decoder_config(checkpoint.path), _config_of(source)
    for field in fields(DecoderConfig):
        mine, theirs = getattr(own, field.name), getattr(other, field.name)
        if field.name not in _NOT_SHAPE and mine != theirs:
            raise ConfigError(
                f"{name} is no variant of {source.name}: its {field.name} is {mine}, that of {source.name} {theirs}"
            )
    return checkpoint


def fitting_checkpoints(model: str) -> list[str]:
    """Stored quantized models that can be variants of a model; all of them while it is not here."""
    quantized = [info.name for info in list_models() if info.quantization is not None]
    try:
        source = resolve_source(model)
    except ModelError:
        return quantized
    return [name for name in quantized if _fits(source, name)]


def _fits(source: ModelSource, name: str) -> bool:
    try:
        named_checkpoint(source, name)
    except (ConfigError, ModelError):
        return False
    return True


def _config_of(source: ModelSource) -> DecoderConfig:
    return DUMMY_SHAPES[source.shape or ""] if source.path is None else load_decoder_config(source.path)
