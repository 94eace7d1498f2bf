"""`servelab quality`: how well a model predicts a text, and what its quantization costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from app import cli_quality_saturation, cli_quality_tables, terminal
from app.cli_models import progress
from app.cli_options import ConfigSetOption, JsonOption
from app.settings_input import engine_config
from backend.errors import ConfigError, ServeLabError

_SAME_MODEL = "self"  # as a reference

_Table = Callable[[TextIO], None]  # prints itself

if TYPE_CHECKING:
    from backend.config import EngineConfig
    from backend.experiments.fp8_saturation import Saturation
    from backend.experiments.ranges import GroupRange
    from backend.models.loader import LoadedModel
    from backend.models.sources import ModelSource


def quality(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A pulled model, a Hugging Face folder, or dummy:<shape>.")
    ],
    text: Annotated[Path, typer.Option("--text", help="A UTF-8 text file to predict.")],
    settings: ConfigSetOption = None,
    reference: Annotated[
        str | None,
        typer.Option(help="A model to compare with, or `self`: the same one with nothing quantized."),
    ] = None,
    reference_settings: Annotated[
        list[str] | None,
        typer.Option(
            "--reference-set",
            metavar="KEY=VALUE",
            help="Override one setting of the reference, which has those of --set but for quantization and cache.dtype.",
        ),
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens read at once; the first is not scored.")] = 1024,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens from window to window; where windows overlap, a token is scored once. The window by default."
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of the text to read; all by default.")] = None,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            help="Also each quantized layer's error, the largest channels of its input, and what saturates in fp8.",
        ),
    ] = False,
    sensitivity: Annotated[
        Literal["kind", "layer"] | None,
        typer.Option(help="Also the quality with each kind of layer, or each layer, quantized alone; over one window."),
    ] = None,
    ranges: Annotated[
        bool,
        typer.Option(
            "--ranges",
            help="Also how far weights, activations, keys, values and attention logits reach, and in which channel.",
        ),
    ] = False,
    questions: Annotated[
        bool, typer.Option("--questions", help="Also how many of 40 short questions are answered word for word.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Perplexity of a model on a text; beside a reference also how far their predictions lie apart.

    KL is in nats, delta p in percent with its standard error.
    """
    config = engine_config(None, settings or []).with_overrides({"model.name": model})
    other = _reference_config(model, reference, settings or [], reference_settings or [])
    if (layers or sensitivity) and other is None:
        raise ConfigError("--layers and --sensitivity compare with a reference; name one with --reference, or `self`")
    span = _Span(window, window if stride is None else stride, max_tokens)
    content = _read(text)
    with terminal.results() as out:
        with terminal.Status() as status:
            document, tables = _measure(config, other, content, span, layers, sensitivity, ranges, status)
            if questions:
                found, table = _ask(config, other, status)
                document |= found
                tables.append(table)
        if as_json:
            terminal.write_document(out, document)
            return
        for index, table in enumerate(tables):
            if index:
                out.write("\n")
            table(out)


@dataclass(frozen=True, slots=True)
class _Span:
    """What is read of the text, in tokens."""

    window: int
    stride: int
    max_tokens: int | None


def _measure(
    config: EngineConfig,
    other: EngineConfig | None,
    text: str,
    span: _Span,
    layers: bool,
    sensitivity: Literal["kind", "layer"] | None,
    ranges: bool,
    status: terminal.Status,
) -> tuple[dict[str, Any], list[_Table]]:
    """What is found, as data and as tables."""
    from backend.compat import configure_cpu_environment

    configure_cpu_environment()

    from backend.experiments.fp8_saturation import measure_saturation
    from backend.experiments.layer_error import comparable_layers, measure_layer_errors, scan_sensitivity
    from backend.experiments.quality import load_pair, measure_quality
    from backend.experiments.ranges import measure_ranges, order, summarize_ranges
    from backend.models.sources import ensure_model

    source = ensure_model(config.model.name, progress(status))
    pair = (ensure_model(other.model.name, progress(status)), other) if other else None
    token_ids = _encode(text, source, pair[0] if pair else None)
    status.show("loading")
    model, reference = load_pair(source, config, pair)
    if other and reference:
        _check_is_plain(config, other, reference.loaded)
    for notice in model.loaded.notices:
        terminal.note(f"note: {notice}")
    if reference and (layers or sensitivity):
        comparable_layers(model, reference)  # said before the text is scored, which takes minutes
    on_tokens = partial(_say, status, "tokens")
    read = {"window": span.window, "max_tokens": span.max_tokens}
    quality = measure_quality(model, token_ids, reference=reference, stride=span.stride, on_progress=on_tokens, **read)
    document: dict[str, Any] = {
        "model": config.model.name,
        "reference": other.model.name if other else None,
        "quantization": model.loaded.quantization.to_dict(),
        "num_quantized_layers": model.loaded.num_quantized_layers,  # a checkpoint's own quantization is no setting
        **asdict(quality),
    }
    tables: list[_Table] = [partial(cli_quality_tables.print_quality, quality)]
    if layers and reference:
        errors = measure_layer_errors(model, reference, token_ids, on_progress=on_tokens, **read)
        found = measure_saturation(model, reference, token_ids, on_progress=on_tokens, **read)
        saturations = {(each.layer, each.kind): each for each in found}
        document["layers"] = [
            asdict(error) | {"saturation": _counts(saturations.get((error.layer, error.kind)))} for error in errors
        ]
        tables.append(partial(cli_quality_tables.print_layers, errors))
        if found:
            tables.append(partial(cli_quality_saturation.print_saturation, found))
    if sensitivity and reference:
        on_parts = partial(_say, status, "parts")
        parts = scan_sensitivity(model, reference, token_ids, sensitivity, on_progress=on_parts, **read)
        document["sensitivity"] = [
            {"part": part.part, "num_layers": part.num_layers, **asdict(part.quality)} for part in parts
        ]
        tables.append(partial(cli_quality_tables.print_sensitivity, parts))
    for each in (model, reference) if ranges else ():
        if each is not None:
            found = measure_ranges(each, token_ids, on_progress=partial(_say, status, "layers"), **read)
            groups = summarize_ranges(found)
            name = "model" if each is model else "reference"
            document.setdefault("ranges", {})[name] = {
                "order": order(groups),
                "groups": [asdict(group) for group in groups],
                "layers": [asdict(row) for row in found],
            }
            tables.append(partial(cli_quality_tables.print_ranges, name, [_with_outlier(group) for group in groups]))
    return document, tables


def _counts(saturation: Saturation | None) -> dict[str, int] | None:
    """Of a layer in fp8, beside what names the layer."""
    if saturation is None:
        return None
    return {name: value for name, value in asdict(saturation).items() if name not in ("layer", "kind")}


def _with_outlier(group: GroupRange) -> GroupRange:
    """For the table, where the part's name tells the outlier's channel too."""
    return replace(group, part=", ".join([group.part, *(f"{axis} {index}" for axis, index in group.outlier.items())]))


def _check_is_plain(config: EngineConfig, other: EngineConfig, loaded: LoadedModel) -> None:
    """Raises `ConfigError` where the model itself is meant to be the reference and is stored quantized."""
    if other.model.name == config.model.name and not other.quantization.method and loaded.num_quantized_layers:
        raise ConfigError(
            f"{config.model.name} is a quantized checkpoint, which cannot be its own reference; name the model it was made of"
        )


def _ask(config: EngineConfig, other: EngineConfig | None, status: terminal.Status) -> tuple[dict[str, Any], _Table]:
    from backend.experiments.questions import ask, exact_match, load_questions

    asked = load_questions()
    configs = {"model": config} | ({"reference": other} if other else {})
    answers = {name: ask(each, asked, status.show_phase) for name, each in configs.items()}
    matches = {name: exact_match(given) for name, given in answers.items()}
    document = {
        "exact_match": {"reference": None, **matches, "num_questions": len(asked)},
        "answers": {
            name: [
                {"question": each.question.question, "text": each.text, "is_correct": each.is_correct} for each in given
            ]
            for name, given in answers.items()
        },
    }
    return document, partial(cli_quality_tables.print_answers, answers)


def _say(status: terminal.Status, unit: str, what: str, done: float, total: float) -> None:
    progress(status)(what, done, total, unit)


def _reference_config(name: str, reference: str | None, settings: list[str], own: list[str]) -> EngineConfig | None:
    """Of the settings, the reference has its own and, of the model's, those that do not quantize."""
    if reference is None:
        if own:
            raise ConfigError("--reference-set has no meaning without --reference")
        return None
    shared = [setting for setting in settings if not setting.startswith(("quantization.", "cache.dtype"))]
    config = engine_config(None, [*shared, *own])
    return config.with_overrides({"model.name": name if reference == _SAME_MODEL else reference})


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ServeLabError(f"{path} cannot be read as UTF-8 text: {error}") from None


def _encode(text: str, source: ModelSource, reference: ModelSource | None) -> list[int]:
    """Raises `ConfigError` where the reference has other tokens for the text."""
    from backend.tokenizer import load_tokenizer

    token_ids = load_tokenizer(source).encode(text)
    if reference is not None and load_tokenizer(reference).encode(text) != token_ids:
        raise ConfigError(f"{source.name} and its reference {reference.name} have other tokens for this text")
    return token_ids
