"""A model's checkpoint in fewer bits, made layer by layer: what `servelab quantize` does.

The inputs of a layer are those that the layers before give as they are stored by then, so that a method sees what it is to
make up for. Those of a layer's four linear modules are taken in one pass, before the first of them is quantized.

Everything is written to a work folder beside the output's place. A second run with the same model, settings and text goes on
behind the last layer that is written there; any other starts afresh. The folder gets the output's name when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from backend.config import QuantizationSettings
from backend.errors import ConfigError, ModelError
from backend.models.checkpoint import Checkpoint
from backend.models.layer_quantizer import LayerQuantizer, head_copy_notice, quantize_head_weight
from backend.models.model_config import DecoderConfig, load_decoder_config
from backend.models.sources import ModelSource
from backend.models.store import read_manifest
from backend.models.weight_slots import EMBEDDING, HEAD, REDUNDANT_SUFFIX, check_weights, layer_linears
from backend.quantization.awq import AWQ
from backend.quantization.base import PackedWeight
from backend.quantization.calibration import InputStats, LayerRunner
from backend.quantization.formats.compressed_tensors import encode, scheme_of
from backend.quantization.formats.scheme import StoredScheme, all_layers_but
from backend.quantization.gptq import quantize_gptq
from backend.quantization.methods import make_method
from backend.quantization.single_layer import SingleLayer, layer_prefix
from backend.quantization.work_folder import WorkFolder

SavedMethod = Literal["int8", "int4", "gptq", "awq", "w8a8_int8", "fp8"]
CALIBRATED = ("gptq", "awq")  # they choose codes on the grids of int4
VERSION = 1  # to be raised when a run gives other files than before: what an older one left is not used then


@dataclass(frozen=True, slots=True)
class Quantized:
    """A linear module of one layer as it is stored.

    Attributes:
        bits_per_weight: scales and zero points included.
        relative_error: of its outputs over the calibration text: the root of their squared error over their square. Rounding
            of activations is not in it.
    """

    layer: int
    module: str
    bits_per_weight: float
    relative_error: float


@dataclass(frozen=True, slots=True)
class QuantizationResult:
    """What was written.

    Attributes:
        skipped: linear modules that are stored as they are, the output head aside.
        resumed_layers: that were there from an earlier run.
        notices: for the user.
        head: how the output head is stored; None: as it is.
    """

    output: Path
    scheme: StoredScheme
    modules: tuple[Quantized, ...]
    skipped: tuple[str, ...]
    resumed_layers: int
    notices: tuple[str, ...]
    head: StoredScheme | None


def grid_settings(
    method: SavedMethod,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    zero_point: str | None = None,
    granularity: str | None = None,
    head: str | None = None,
    skip: Sequence[str] = (),
) -> QuantizationSettings:
    """The settings of weights rounded to nearest on the grids of `method`. Raises `ConfigError` for what does not go together."""
    everywhere = {"granularity": granularity, "head": head, "skip": tuple(skip)}
    on_grid = method in (*CALIBRATED, "int4")
    given = {"bits": bits, "group_size": group_size, "zero_point": zero_point}
    if unfitting := [name for name, value in given.items() if value is not None and not on_grid]:
        raise ConfigError(
            f"{unfitting[0]} does not go with method {method}; it goes with int4, {', '.join(CALIBRATED)}"
        )
    if on_grid:
        # Unlike a model quantized as it is loaded, one that is saved can have no floating minimums.
        return QuantizationSettings.from_dict(
            given | everywhere | {"method": "int4", "zero_point": zero_point or "integer"}
        )
    return QuantizationSettings.from_dict(everywhere | {"method": method})


def quantize_model(
    source: ModelSource,
    method: SavedMethod,
    settings: QuantizationSettings,
    windows: Tensor,
    work: WorkFolder,
    *,
    device: torch.device,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> QuantizationResult:
    """Write `source` with its layers quantized to the output of `work`.

    Args:
        settings: of `grid_settings`.
        windows: int64 [num_windows, length], token ids to calibrate on.
        on_progress: called with the number of layers done and of all.
    Raises:
        ConfigError: the settings do not fit the model, the model is a dummy or quantized already, or another run makes the
            same output.
        ModelError: the model's files are damaged or lack a tensor, or the output cannot be written.
    """
    if source.path is None:
        raise ConfigError(f"{source.name} has no files to make a quantized folder of; name a model that has")
    if work.output.resolve() == source.path.resolve():
        raise ConfigError(f"{work.output} is the model itself; name another folder for the quantized one")
    config = load_decoder_config(source.path)
    if config.stored_quantization is not None:
        raise ConfigError(f"{source.name} is quantized already; name the model that it was made of")
    with Checkpoint(source.path) as checkpoint:
        check_weights(config, checkpoint)
    chosen = LayerQuantizer(config, settings, torch.float32)
    scheme = scheme_of(chosen.settings)
    head_scheme = scheme_of(QuantizationSettings(method=settings.head)) if settings.head else None
    notices = chosen.notices
    runner = LayerRunner(config, windows.shape[1], device)
    try:
        work.open(_key(source, method, chosen.settings, windows, device))
        num_resumed = len(work.finished)
        with Checkpoint(source.path) as checkpoint:
            if num_resumed < config.num_layers:
                _Run(config, method, chosen, scheme, checkpoint, work, runner, device).all_layers(windows, on_progress)
            others = {
                name: checkpoint.tensor(name)
                for name in checkpoint.names
                if not name.startswith("model.layers.") and not name.endswith(REDUNDANT_SUFFIX)
            }
            if head_scheme is not None:
                notices += _quantize_head(others, head_scheme)
            stored = all_layers_but(scheme, _projections(config, chosen.skipped), head_scheme)
            work.publish(source.path, others, stored)
    finally:
        work.close()
    return QuantizationResult(
        output=work.output,
        scheme=scheme,
        modules=tuple(Quantized(**module) for layer in work.finished for module in layer),
        skipped=chosen.skipped,
        resumed_layers=num_resumed,
        notices=notices,
        head=head_scheme,
    )


def _quantize_head(others: dict[str, Tensor], scheme: StoredScheme) -> tuple[str, ...]:
    """Put a head in int8 among the tensors outside of layers, in the place of one in full; returns what is to be said of it."""
    is_tied = HEAD not in others
    name = EMBEDDING if is_tied else HEAD
    weight = others[name]
    packed = quantize_head_weight(name, weight)
    others.pop(HEAD, None)
    others |= {f"{HEAD.removesuffix('weight')}{suffix}": tensor for suffix, tensor in encode(packed, scheme).items()}
    return (head_copy_notice(weight.dtype, packed),) if is_tied else ()


def fingerprint(source: ModelSource) -> list[Any]:
    """Changes with what a model's files hold, as far as can be told without reading them. JSON-safe.

    A stored model is known by what it was made of: one that was pulled anew is the same.
    """
    assert source.path is not None
    if source.revision is not None:
        manifest = read_manifest(source.path)
        return [manifest.sha256, manifest.format]
    files = sorted(path for path in source.path.iterdir() if path.suffix in (".json", ".safetensors"))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


class _Run:
    """One pass over the layers that are not written yet."""

    def __init__(
        self,
        config: DecoderConfig,
        method: SavedMethod,
        chosen: LayerQuantizer,
        scheme: StoredScheme,
        checkpoint: Checkpoint,
        work: WorkFolder,
        runner: LayerRunner,
        device: torch.device,
    ) -> None:
        self._config, self._method, self._chosen, self._scheme = config, method, chosen, scheme
        self._checkpoint, self._work, self._runner, self._device = checkpoint, work, runner, device
        self._single = SingleLayer(config, device)

    def all_layers(self, windows: Tensor, on_progress: Callable[[int, int], None]) -> None:
        hidden = F.embedding(windows, self._checkpoint.tensor(EMBEDDING)).to(self._device, torch.float32)
        num_finished = len(self._work.finished)
        for index, window in enumerate(self._config.windows):
            on_progress(index, self._config.num_layers)
            modules = [name for name in self._single.linears if f"layers.{index}.{name}" in self._chosen.quantized]
            if index >= num_finished:
                self._quantize(index, modules, hidden, window)
            if index + 1 < self._config.num_layers:
                self._single.load_encoded(index, self._work.read_layer(index), dict.fromkeys(modules, self._scheme))
                self._runner.advance(self._single.layer, hidden, window)
        on_progress(self._config.num_layers, self._config.num_layers)

    def _quantize(self, index: int, modules: list[str], hidden: Tensor, window: int | None) -> None:
        single, settings = self._single, self._chosen.settings
        single.load(index, self._checkpoint.tensor)
        stats = self._runner.collect(single.layer, single.linears, hidden, window)
        for name, of_module in stats.items():
            if not of_module.hessian.isfinite().all():
                raise ModelError(
                    f"layers.{index}.{name} gets inputs that are infinite, NaN or beyond float32's range when squared, on "
                    "the calibration text: the model itself does not run in float32"
                )
        quantize: Callable[[str, Tensor, InputStats], PackedWeight]
        if self._method in CALIBRATED:
            assert settings.bits is not None
            assert settings.group_size is not None
            assert settings.zero_point is not None
            grid = (settings.bits, settings.group_size, settings.zero_point)
            if self._method == "awq":
                awq = AWQ(self._config, *grid)
                stats = awq.scale(single.layer, stats, modules)
                quantize = awq.quantize
            else:
                quantize = lambda module, weight, of: quantize_gptq(weight, of.hessian, *grid)  # noqa: E731
        else:
            method = make_method(settings)
            assert method is not None
            quantize = lambda module, weight, of: method.quantize(weight)  # noqa: E731
        packed = {name: quantize(name, single.weight(name), stats[name]) for name in modules}
        tensors = single.encode(index, packed, self._scheme, lambda name: self._checkpoint.tensor(name).dtype)
        report = [
            Quantized(
                index,
                name,
                single.encoded_bytes(index, name, tensors) * 8 / single.weight(name).numel(),
                _relative_error(weight, single.weight(name), stats[name]),
            )
            for name, weight in packed.items()
        ]
        self._work.write_layer(index, tensors, [asdict(module) for module in report])


def _relative_error(packed: PackedWeight, weight: Tensor, stats: InputStats) -> float:
    whole = stats.squared_error(weight)
    return (stats.squared_error(packed.dequantize() - weight) / whole) ** 0.5 if whole else 0.0


def _projections(config: DecoderConfig, paths: Sequence[str]) -> tuple[str, ...]:
    """Of linear modules, by their names in a checkpoint."""
    linears = layer_linears(config)
    found = []
    for path in paths:
        _, index, module = path.split(".", 2)
        found += [layer_prefix(int(index)) + name for name in linears[module].projections]
    return tuple(found)


def _key(
    source: ModelSource, method: SavedMethod, settings: QuantizationSettings, windows: Tensor, device: torch.device
) -> str:
    """Changes with all that decides what is written."""
    what: Mapping[str, object] = {
        "version": VERSION,
        "method": method,
        "settings": settings.to_dict(),
        "files": fingerprint(source),
        "windows": [*windows.shape, blake2b(windows.numpy().tobytes()).hexdigest()],
        "device": device.type,
    }
    return blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=16).hexdigest()
