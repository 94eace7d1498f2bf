"""The quantization lab: a model stored in several ways, each measured beside the model as it is, as one run of the queue.

Of each variant: bits per weight and bytes, perplexity and divergence from the reference on a text, the error of each layer's
output, and tokens per second. A variant whose products are emulated has no speed. Or, by `experiment`, what parts of its
layers cost alone, or how far the values in it reach. What fails is a result too, and the others go on; results are handed on
one by one, the parts of a scan among them, so that a run that is ended loses what it is measuring and nothing before it. No
torch at module level.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from backend.config import EngineConfig, default_cpu_threads
from backend.errors import ConfigError, ServeLabError
from backend.experiments.layer_error import measure_layer_errors, scan_sensitivity
from backend.experiments.quality import RememberedModel, measure_quality
from backend.experiments.quantization_checkpoints import calibrated_checkpoint, calibration_texts, named_checkpoint
from backend.experiments.quantization_config import REFERENCE, QuantizationLabConfig, Variant, parse_variant
from backend.experiments.quantization_figures import Result, figures, storage, stored_settings
from backend.experiments.quantization_speed import measure_speed
from backend.experiments.ranges import EXPECTED_ORDER, MOST_TOKENS, measure_ranges
from backend.experiments.text_pass import TextModel, load_text_model
from backend.metrics.environment import environment
from backend.metrics.stats import Phase, RunEnd, RunStart, StatsSink
from backend.models.sources import ModelSource, ensure_model, is_pullable, resolve_source
from backend.models.store import is_complete

OnResult = Callable[[Result], None]

DEFAULT_TEXT = Path(__file__).with_name("data") / "evaluation.txt"
WINDOW = 1024
LAYER_TOKENS = 256  # of the text, on which layers are measured: their errors settle long before the text's figures do
_CHARACTERS_PER_TOKEN = 16  # few tokens have more; what is beyond that many times the budget is not encoded

logger = logging.getLogger(__name__)


class _Cancelled(Exception):
    """Leaves a measurement from within its progress callback."""


def check_lab(config: QuantizationLabConfig) -> None:
    """Find what would fail the whole run and is known without the model. Raises `ModelError` or `ConfigError`."""
    is_here = is_complete(config.model) or not is_pullable(config.model)
    source = resolve_source(config.model) if is_here else None
    for variant in map(parse_variant, config.variants):
        if variant.checkpoint is not None and source is not None:
            named_checkpoint(source, variant.checkpoint)
    _read_text(config)
    if config.calibration is not None:
        calibration_texts(config.calibration)


def run_lab(config: QuantizationLabConfig, sink: StatsSink, on_result: OnResult, cancel: threading.Event) -> RunEnd:
    """Measure every variant of `config`; returns within a window of the text, or a layer of a checkpoint, after `cancel`.

    A variant that fails makes the run a failed one; its row says why. The error of a run that is cancelled within a scan says
    how much of the scan there is.

    Args:
        on_result: gets each result at once.
    Raises:
        ServeLabError: the model or the text cannot be measured at all.
    """
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(default_cpu_threads())
    lab = _Lab(config, sink, on_result, cancel)
    try:
        lab.run()
    except _Cancelled:
        return RunEnd("cancelled", time.perf_counter(), error=lab.unfinished_scan)
    error = "; ".join(lab.failures) or None
    return RunEnd("failed" if error else "finished", time.perf_counter(), error=error)


class _Lab:
    """One run of the lab."""

    def __init__(
        self, config: QuantizationLabConfig, sink: StatsSink, on_result: OnResult, cancel: threading.Event
    ) -> None:
        self._config, self._sink, self._on_result, self._cancel = config, sink, on_result, cancel
        self._variants = [(text, parse_variant(text)) for text in config.variants]
        self._what, self._place, self._num_places = config.model, 0, len(config.variants) + 1
        self.failures: list[str] = []  # of single variants; the others go on
        self.unfinished_scan: str | None = None  # how far the scan under way is, once it has a part

    def run(self) -> None:
        import torch

        from backend.tokenizer import load_tokenizer

        config = self._config
        self._say("reading the text")
        source = ensure_model(config.model, self._on_pull)
        self._token_ids = load_tokenizer(source).encode(_read_text(config))[: config.max_tokens]
        self._say("loading")
        self._reference = load_text_model(source, EngineConfig().with_overrides({"model.name": config.model}))
        if self._reference.loaded.num_quantized_layers:
            raise ConfigError(f"{config.model} is a quantized checkpoint; name the model that it was made of")
        self._remembered = RememberedModel.of(self._reference)
        self._window = min(WINDOW, self._reference.loaded.config.max_position_embeddings)
        on_cpu = self._reference.device == "cpu"
        self._sink.on_run_start(
            RunStart(
                start_time=time.perf_counter(),
                resolved_config=config.to_dict(),
                environment=environment(torch.get_num_threads() if on_cpu else None),
                load={
                    "num_parameters": self._reference.loaded.num_parameters,
                    "num_tokens": len(self._token_ids),
                    "window": self._window,
                    "dtype": str(self._reference.loaded.model.final_norm.weight.dtype).removeprefix("torch."),
                },
                notices=self._reference.loaded.notices,
                cache_state={},
                num_requests=0,
            )
        )
        match config.experiment:
            case "compare":
                self._measure_reference(source)
            case "ranges":
                self._put_ranges(REFERENCE, self._reference, {})
        measure = {"compare": self._compare, "sensitivity": self._scan, "ranges": self._ranges}[config.experiment]
        for text, variant in self._variants:
            self._what, self._place, self.unfinished_scan = variant.name, self._place + 1, None
            with self._keeping_failures(text):
                measure(source, text, variant)
            gc.collect()  # the next variant needs the room
            if not on_cpu:
                torch.cuda.empty_cache()

    def _measure_reference(self, source: ModelSource) -> None:
        started = time.perf_counter()
        quality = measure_quality(
            self._remembered, self._token_ids, window=self._window, stride=self._window, on_progress=self._on_progress
        )
        engine_config = EngineConfig().with_overrides({"model.name": self._config.model})
        is_emulated = self._reference.loaded.emulated_quantization
        result = storage(self._reference) | figures(quality) | self._speed(is_emulated, engine_config)
        self._put(
            REFERENCE,
            result | {"measure_s": time.perf_counter() - started, "settings": stored_settings(self._reference)},
        )

    def _compare(self, source: ModelSource, text: str, variant: Variant) -> None:
        model, found = self._prepare(source, variant)
        started = time.perf_counter()
        quality = measure_quality(
            model,
            self._token_ids,
            reference=self._remembered,
            window=self._window,
            stride=self._window,
            on_progress=self._on_progress,
        )
        result = found | storage(model) | figures(quality)
        if self._config.layers and model.loaded.num_quantized_layers:
            result |= self._layer_errors(model)
        config = variant.engine_config(found["checkpoint"] or self._config.model)
        is_emulated = model.loaded.emulated_quantization
        del model  # the engine loads it anew: once is what it takes
        gc.collect()  # a layer and its hooks hold each other
        result |= self._speed(is_emulated, config)
        self._put(text, result | {"measure_s": time.perf_counter() - started})

    def _scan(self, source: ModelSource, text: str, variant: Variant) -> None:
        model, found = self._prepare(source, variant)

        def on_progress(what: str, done: float, total: float) -> None:
            if done:
                self.unfinished_scan = f"{self._what}: cancelled after {done:.0f} of {total:.0f} parts, which are kept"
            self._on_part("parts", what, done, total)

        scan_sensitivity(
            model,
            self._reference,
            self._token_ids,
            self._config.by,
            window=self._window,
            on_part=lambda part: self._put(
                text, found | figures(part.quality) | {"part": part.part, "num_layers": part.num_layers}
            ),
            on_progress=on_progress,
        )

    def _ranges(self, source: ModelSource, text: str, variant: Variant) -> None:
        self._put_ranges(text, *self._prepare(source, variant))

    def _put_ranges(self, text: str, model: TextModel, found: Result) -> None:
        """A row for each group of values."""
        ranges = measure_ranges(
            model, self._token_ids, window=self._window, on_progress=partial(self._on_part, "layers")
        )
        num_tokens = min(len(self._token_ids), self._window, MOST_TOKENS)
        for group in EXPECTED_ORDER:
            layers = [asdict(each) for each in ranges if each.group == group]
            self._put(text, found | {"part": group, "num_tokens": num_tokens, "layers": layers})

    def _prepare(self, source: ModelSource, variant: Variant) -> tuple[TextModel, Result]:
        """The variant as it runs, and where it is to be found again."""
        started = time.perf_counter()
        stored, checkpoint = source, variant.checkpoint
        if checkpoint is not None:
            stored = self._named_checkpoint(source, checkpoint)
        elif variant.is_calibrated:
            stored = calibrated_checkpoint(source, variant, self._on_layers, self._config.calibration)
            checkpoint = str(stored.path)
        self._say("loading")
        model = load_text_model(stored, variant.engine_config(self._config.model))
        settings = stored_settings(model, variant)
        return model, {"prepare_s": time.perf_counter() - started, "checkpoint": checkpoint, "settings": settings}

    def _named_checkpoint(self, source: ModelSource, name: str) -> ModelSource:
        from backend.tokenizer import load_tokenizer

        stored = named_checkpoint(source, name)
        token_ids = load_tokenizer(stored).encode(_read_text(self._config))[: self._config.max_tokens]
        if token_ids != self._token_ids:
            raise ConfigError(f"{name} is no variant of {source.name}: its tokenizer makes other tokens of the text")
        return stored

    def _layer_errors(self, model: TextModel) -> Result:
        try:
            errors = measure_layer_errors(
                model,
                self._reference,
                self._token_ids,
                window=self._window,
                max_tokens=min(LAYER_TOKENS, len(self._token_ids)),
                on_progress=self._on_progress,
            )
        except ConfigError as error:
            return {"layers_problem": str(error)}
        return {"layers": [asdict(error) for error in errors]}

    def _speed(self, is_emulated: bool, config: EngineConfig) -> Result:
        if is_emulated or not self._config.speed:
            return {"emulated": is_emulated}
        return asdict(measure_speed(config, self._token_ids, self._say)) | {"emulated": False}

    @contextmanager
    def _keeping_failures(self, text: str) -> Iterator[None]:
        """A variant that fails has a row that says why."""
        try:
            yield
        except _Cancelled:
            raise
        except Exception as error:
            is_known = isinstance(error, ServeLabError)
            if not is_known:
                logger.exception("variant %s failed", text)
            problem = str(error) if is_known else f"{type(error).__name__}: {error}"
            self._put(text, {"problem": problem})
            self.failures.append(f"{self._what}: {problem}")

    def _put(self, variant: str, result: Result) -> None:
        self._on_result(result | {"variant": variant})

    def _on_pull(self, what: str, done: float, total: float, unit: str) -> None:
        self._check()
        self._sink.on_phase(Phase("pulling", done, total, unit) if total else Phase("pulling"))

    def _on_progress(self, what: str, done: float, total: float) -> None:
        self._say(what, done, total)

    def _on_layers(self, done: int, total: int) -> None:
        self._say("choosing codes", done, total)

    def _on_part(self, unit: str, what: str, done: float, total: float) -> None:
        """The bar is of one variant, which takes a while by itself."""
        self._check()
        self._sink.on_phase(Phase(f"{self._what}: {what}", done, total, unit))

    def _say(self, what: str, done: float = 0, total: float = 0) -> None:
        """How far this variant is stands in words; the bar is of all variants, the reference among them."""
        self._check()
        where = f" {done / total:.0%}" if total else ""
        self._sink.on_phase(Phase(f"{self._what}: {what}{where}, variants done", self._place, self._num_places))

    def _check(self) -> None:
        if self._cancel.is_set():
            raise _Cancelled


def _read_text(config: QuantizationLabConfig) -> str:
    path = DEFAULT_TEXT if config.text is None else Path(config.text).expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(_CHARACTERS_PER_TOKEN * config.max_tokens)
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: of other bytes, and of a path with a NUL in it
        shown = (config.text or str(path)).replace("\0", "\\0")
        raise ConfigError(f"{shown} cannot be read as UTF-8 text: {error}") from None
