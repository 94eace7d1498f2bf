"""A variant of the quantization lab stored as a model like any other, as one run of the queue. No torch at module level."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from backend.config import default_cpu_threads
from backend.errors import ConfigError
from backend.experiments.quantization_checkpoints import (
    calibrated_checkpoint,
    calibration_texts,
    saved_settings,
    why_not_saved,
)
from backend.experiments.quantization_config import QuantizationLabConfig, Variant, parse_variant
from backend.metrics.environment import environment
from backend.metrics.stats import Phase, RunEnd, RunStart, StatsSink
from backend.models.folder import add_folder, check_new_name
from backend.models.sources import ModelSource, ensure_model, is_pullable, resolve_source

# Of a method that rounds to nearest: its codes are the same whatever the text, of which errors are a by-product.
_ROUNDED_WINDOWS = 1
_ROUNDED_LENGTH = 32

_KEPT = "The layers that are finished are kept: saving it again under the same name goes on behind them"


class _Cancelled(Exception):
    """Leaves the work from within its progress callback."""


def check_save(config: QuantizationLabConfig) -> None:
    """Find what would fail the run and is known without the model. Raises `ModelError` or `ConfigError`."""
    if problem := why_not_saved(_variant(config)):
        raise ConfigError(problem)
    check_new_name(config.name or "")
    if config.calibration is not None:
        calibration_texts(config.calibration)
    source = None if is_pullable(config.model) else resolve_source(config.model)
    if source is not None and source.path is None:
        raise ConfigError(f"{config.model} has no files to make a checkpoint of; name a model that has")


def run_save(config: QuantizationLabConfig, sink: StatsSink, cancel: threading.Event) -> RunEnd:
    """Quantize `config.model` by its one variant into a stored model called `config.name`; returns soon after `cancel`.

    What a calibrated method has chosen for the lab is taken as it is. What a run that was ended has finished is kept, and the
    next one goes on behind it.

    Raises:
        ServeLabError: it cannot be made or stored.
    """
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(default_cpu_threads())
    num_done = 0

    def say(what: str, done: float = 0, total: float = 0, unit: str = "") -> None:
        if cancel.is_set():
            raise _Cancelled
        sink.on_phase(Phase(what, done, total, unit) if total else Phase(what))

    def on_layers(done: int, total: int) -> None:
        nonlocal num_done
        num_done = done
        say("quantizing", done, total, "layers")

    try:
        source = ensure_model(config.model, lambda what, done, total, unit: say("pulling", done, total, unit))
        say("reading the calibration text")
        is_on_cpu = not torch.cuda.is_available()
        sink.on_run_start(
            RunStart(
                start_time=time.perf_counter(),
                resolved_config=config.to_dict(),
                environment=environment(torch.get_num_threads() if is_on_cpu else None),
                load={},
                notices=(),
                cache_state={},
                num_requests=0,
            )
        )
        _save(config, source, say, on_layers)
    except _Cancelled:
        return RunEnd("cancelled", time.perf_counter(), error=_KEPT if num_done else None)
    return RunEnd("finished", time.perf_counter())


def _save(
    config: QuantizationLabConfig,
    source: ModelSource,
    say: Callable[[str, float, float, str], None],
    on_layers: Callable[[int, int], None],
) -> None:
    import torch

    from backend.models.model_config import load_decoder_config
    from backend.quantization.calibration import cut_windows
    from backend.quantization.quantize_model import quantize_model
    from backend.quantization.work_folder import named_work_folder, provenance
    from backend.tokenizer import load_tokenizer

    variant, name = _variant(config), config.name or ""
    method, settings = saved_settings(variant)
    check_new_name(name)  # before the work, not behind it
    if variant.is_calibrated:
        made = calibrated_checkpoint(source, variant, on_layers, config.calibration).path
        assert made is not None
        add_folder(made, name, say, provenance(config.model, method))
        return
    assert source.path is not None
    length = min(_ROUNDED_LENGTH, load_decoder_config(source.path).max_position_embeddings)
    tokenizer = load_tokenizer(source)
    token_ids = [id for text in calibration_texts(config.calibration) for id in tokenizer.encode(text)]
    quantize_model(
        source,
        method,
        settings,
        cut_windows(token_ids, _ROUNDED_WINDOWS, length, 0),
        named_work_folder(name, config.model, method),
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        on_progress=on_layers,
    )


def _variant(config: QuantizationLabConfig) -> Variant:
    return parse_variant(config.variants[0])
