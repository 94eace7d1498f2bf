"""Checkpoints that the quantization lab makes by calibrated methods, kept among the models and used again. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from typing import cast

from backend.errors import ConfigError
from backend.experiments.quantization_config import Variant
from backend.models.sources import ModelSource
from backend.models.store import building
from backend.paths import models_home

NUM_WINDOWS = 16
WINDOW_LENGTH = 256
_FOLDER = ".quantized"  # hidden: a list of models does not show it

ProgressCallback = Callable[[int, int], None]  # layers done, layers in all


def calibrated_checkpoint(source: ModelSource, variant: Variant, on_progress: ProgressCallback) -> ModelSource:
    """The folder that `servelab quantize` would make with this many windows of the text that ships for calibration.

    Made on the first call; another process that makes the same is waited for. Layers of a call that was ended, by whatever
    means, lie beside the folder's place, and the next call goes on behind them.

    Raises:
        ConfigError: the method does not fit the model, or the model has no files.
        ModelError: the model's files are damaged, or the folder cannot be written.
    """
    import torch

    from backend.models.model_config import load_decoder_config
    from backend.quantization.calibration import DEFAULT_TEXT, cut_windows, read_texts
    from backend.quantization.quantize_model import VERSION, SavedMethod, fingerprint, grid_settings, quantize_model
    from backend.quantization.work_folder import WorkFolder
    from backend.tokenizer import load_tokenizer

    if source.path is None:
        raise ConfigError(
            f"{source.name} has no files to make a checkpoint of by {variant.method}; name a model that has"
        )
    method, grid = cast(SavedMethod, variant.method), variant.quantization
    settings = grid_settings(method, bits=grid.bits, group_size=grid.group_size, zero_point=grid.zero_point)
    texts = read_texts(DEFAULT_TEXT)
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
                token_ids = [id for text in texts for id in load_tokenizer(source).encode(text)]
                windows = cut_windows(token_ids, NUM_WINDOWS, length, 0)
                work = WorkFolder(output, force=False)
                quantize_model(source, method, settings, windows, work, device=device, on_progress=on_progress)
    return ModelSource(f"{source.name} in {method}", "folder", path=output)
