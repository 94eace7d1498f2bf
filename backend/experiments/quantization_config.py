"""What a run of the quantization lab is asked to do. No torch.

A variant is written as `METHOD[:OPTION=VALUE,...]`, for example `int8`, `int4:group_size=32,zero_point=integer`, `gptq:bits=3`
or `none:kv=int4`. Options are those of `QuantizationSettings`, of which `skip` may be repeated, and `kv` for `cache.dtype`. Or
it is a quantized model: a stored one's name, or a folder, written with a slash.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from backend.config import DEFAULT_MODEL, EngineConfig, QuantizationSettings
from backend.errors import ConfigError
from backend.models.store import stored_names
from backend.settings import Settings

Experiment = Literal["compare", "sensitivity", "ranges", "save"]
Part = Literal["kind", "layer"]

REFERENCE = "reference"  # the model as it is, in the results
CALIBRATED = ("gptq", "awq")  # made as a checkpoint, on the grids of int4
NONE = "none"
METHODS = (*get_args(get_args(QuantizationSettings.model_fields["method"].annotation)[0]), *CALIBRATED)
DEFAULT_VARIANTS = (
    "int8",
    "w8a8_int8",
    "int4:zero_point=float",
    "int4:zero_point=integer",
    "nf4",
    "fp8",
    "llm_int8",
    "gptq",
    "awq",
    "none:kv=fp8_e4m3",
    "none:kv=int8",
    "none:kv=int4",
)

_KV = "kv"
_SKIP = "skip"
_OPTIONS = ("bits", "group_size", "zero_point", "granularity", "threshold", "head", _SKIP)
_WORDS = {"none": "symmetric", "integer": "zero point", "float": "minimum"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to store a model.

    Attributes:
        method: as it was asked for; None where weights stay as they are.
        quantization: of weights as they are loaded; of a calibrated method, the grid on which it chooses codes.
        cache_dtype: of the KV cache.
        checkpoint: a quantized model that is there: a stored one's name, or the absolute path of a folder.
    """

    method: str | None
    quantization: QuantizationSettings
    cache_dtype: str = "auto"
    checkpoint: str | None = None

    @property
    def is_calibrated(self) -> bool:
        return self.method in CALIBRATED

    @property
    def name(self) -> str:
        """In a few words: `int4 g64 minimum`, `gptq 3 bits`, `KV int4`."""
        if self.checkpoint is not None:
            return Path(self.checkpoint).name
        settings = self.quantization
        parts = [self.method] if self.method else []
        if settings.bits is not None:
            parts.append(f"{settings.bits} bits")
        if settings.group_size is not None:
            parts.append("per channel" if settings.group_size == -1 else f"g{settings.group_size}")
        if settings.zero_point is not None and (not self.is_calibrated or settings.zero_point != "integer"):
            parts.append(_WORDS[settings.zero_point])
        if settings.granularity is not None:
            parts.append(f"per {settings.granularity}")
        if settings.threshold is not None:
            parts.append(f"above {settings.threshold:g}")
        if settings.head is not None:
            parts.append(f"head {settings.head}")
        if settings.skip:
            parts.append(f"without {', '.join(settings.skip)}")
        if self.cache_dtype != "auto":
            parts.append(f"KV {self.cache_dtype}")
        return " ".join(parts) or NONE

    def engine_config(self, model: str) -> EngineConfig:
        """That loads this variant; `model` is the checkpoint where there is one."""
        return EngineConfig.from_dict(
            {
                "model": {"name": model},
                "cache": {"dtype": self.cache_dtype},
                "quantization": {} if self.is_calibrated else self.quantization.to_dict(),
            }
        )


def parse_variant(text: str) -> Variant:
    """Raises `ConfigError` naming what of it is not known, or does not go together.

    Whether a folder is there, and is a quantized model, is looked at when it is needed.
    """
    method, _, rest = text.strip().partition(":")
    if method not in (*METHODS, NONE):
        if checkpoint := _checkpoint(text.strip()):
            return Variant(None, QuantizationSettings(), checkpoint=checkpoint)
        raise ConfigError(
            f"variant {text!r}: there is no method {method!r}; allowed: {', '.join((*METHODS, NONE))}, or a quantized model: "
            "a stored one's name, or a folder, as in ./folder"
        )
    options: dict[str, Any] = {}
    for option in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or key not in (*_OPTIONS, _KV):
            raise ConfigError(
                f"variant {text!r}: {option!r} is no option; allowed: {', '.join((*_OPTIONS, _KV))}, each KEY=VALUE"
            )
        if key == _SKIP:
            options[key] = (*options.get(key, ()), value)
        else:
            options[key] = _value(value)
    if method == NONE and _SKIP in options:
        raise ConfigError(
            f"variant {text!r}: skip = {options[_SKIP][0]!r} leaves layers out, and {NONE} quantizes none"
        )
    cache_dtype = options.pop(_KV, "auto")
    settings = options | {"method": None if method == NONE else method}
    if method in CALIBRATED:
        settings |= {"method": "int4", "zero_point": options.get("zero_point", "integer")}
    try:
        config = EngineConfig.from_dict({"quantization": settings, "cache": {"dtype": cache_dtype}})
    except ConfigError as error:
        raise ConfigError(f"variant {text!r}: {error}") from None
    if method == NONE and config == EngineConfig():
        raise ConfigError(f"variant {text!r} changes nothing: that is the reference, which is measured anyway")
    return Variant(None if method == NONE else method, config.quantization, config.cache.dtype)


def variant_name(text: str) -> str:
    """Of a stored variant, as people read it; one that is not known any more as it stands."""
    try:
        return text if text == REFERENCE else parse_variant(text).name
    except ConfigError:
        return text


def _checkpoint(text: str) -> str | None:
    """The stored model or folder that a text names; None where it can be neither."""
    if text in stored_names():
        return text
    try:
        return str(Path(text).expanduser().absolute()) if "/" in text else None
    except RuntimeError:
        raise ConfigError(f"variant {text!r}: no user has a home of this name") from None


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class QuantizationLabConfig(Settings):
    """Which variants of which model, on which text."""

    model: str = Field(
        DEFAULT_MODEL, min_length=1, description="A pulled model, a Hugging Face folder, or dummy:<shape>."
    )
    experiment: Experiment = Field(
        "compare",
        description="compare: each variant beside the model. sensitivity: the model with a part of its layers quantized. "
        "ranges: how far the values in the model and in each variant reach. save: the variant becomes a stored model.",
    )
    by: Part = Field("kind", description="What a sensitivity scan quantizes at a time: a kind of layer, or one layer.")
    variants: tuple[str, ...] = Field(
        DEFAULT_VARIANTS,
        strict=False,
        min_length=1,
        description="METHOD[:OPTION=VALUE,...], as int4:group_size=32, or a quantized model.",
    )
    name: str | None = Field(None, description="Of the model to store.")
    text: str | None = Field(None, description="A UTF-8 text file to predict; by default one that ships.")
    max_tokens: int = Field(2048, ge=2, le=2**24, description="Tokens of the text to read.")
    calibration: str | None = Field(
        None,
        description="A UTF-8 text, or JSON lines with text or prompt, for gptq and awq; by default one that ships.",
    )
    layers: bool = Field(True, description="Also the error of each layer's output.")
    speed: bool = Field(True, description="Also tokens per second, where they are not emulated.")

    @field_validator("variants")
    @classmethod
    def _known_variants(cls, variants: tuple[str, ...]) -> tuple[str, ...]:
        seen: dict[Variant, str] = {}
        for text in variants:
            try:
                variant = parse_variant(text)
                seen.setdefault(variant, variant.checkpoint or text.strip())
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return tuple(seen.values())

    @model_validator(mode="after")
    def _one_is_saved_under_a_name(self) -> Self:
        is_save = self.experiment == "save"
        if is_save != (self.name is not None) or (is_save and len(self.variants) != 1):
            raise ValueError("experiment = 'save' stores one variant, under a name")
        return self
