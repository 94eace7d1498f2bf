"""What a run of the quantization lab is asked to do. No torch.

A variant is written as `METHOD[:OPTION=VALUE,...]`, for example `int8`, `int4:group_size=32,zero_point=integer`, `gptq:bits=3`
or `none:kv=int4`. Options are those of `QuantizationSettings`, and `kv` for `cache.dtype`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from backend.config import DEFAULT_MODEL, EngineConfig, QuantizationSettings
from backend.errors import ConfigError
from backend.settings import Settings

Experiment = Literal["compare", "sensitivity"]

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
_OPTIONS = ("bits", "group_size", "zero_point", "granularity", "threshold", "head")
_WORDS = {"none": "symmetric", "integer": "zero point", "float": "minimum"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to store a model.

    Attributes:
        method: as it was asked for; None where weights stay as they are.
        quantization: of weights as they are loaded; of a calibrated method, the grid on which it chooses codes.
        cache_dtype: of the KV cache.
    """

    method: str | None
    quantization: QuantizationSettings
    cache_dtype: str = "auto"

    @property
    def is_calibrated(self) -> bool:
        return self.method in CALIBRATED

    @property
    def name(self) -> str:
        """In a few words: `int4 g64 minimum`, `gptq 3 bits`, `KV int4`."""
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
        if self.cache_dtype != "auto":
            parts.append(f"KV {self.cache_dtype}")
        return " ".join(parts) or NONE

    def engine_config(self, model: str) -> EngineConfig:
        """That loads this variant; `model` is the checkpoint where the method is calibrated."""
        return EngineConfig.from_dict(
            {
                "model": {"name": model},
                "cache": {"dtype": self.cache_dtype},
                "quantization": {} if self.is_calibrated else self.quantization.to_dict(),
            }
        )


def parse_variant(text: str) -> Variant:
    """Raises `ConfigError` naming what of it is not known, or does not go together."""
    method, _, rest = text.strip().partition(":")
    if method not in (*METHODS, NONE):
        raise ConfigError(f"variant {text!r}: there is no method {method!r}; allowed: {', '.join((*METHODS, NONE))}")
    options: dict[str, Any] = {}
    for option in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or key not in (*_OPTIONS, _KV):
            raise ConfigError(
                f"variant {text!r}: {option!r} is no option; allowed: {', '.join((*_OPTIONS, _KV))}, each KEY=VALUE"
            )
        options[key] = _value(value)
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
        description="compare: each variant beside the model. sensitivity: the model with one kind of its layers quantized.",
    )
    variants: tuple[str, ...] = Field(
        DEFAULT_VARIANTS, strict=False, min_length=1, description="METHOD[:OPTION=VALUE,...], as int4:group_size=32."
    )
    text: str | None = Field(None, description="A UTF-8 text file to predict; by default one that ships.")
    max_tokens: int = Field(2048, ge=2, le=2**24, description="Tokens of the text to read.")
    layers: bool = Field(True, description="Also the error of each layer's output.")
    speed: bool = Field(True, description="Also tokens per second, where they are not emulated.")

    @field_validator("variants")
    @classmethod
    def _known_variants(cls, variants: tuple[str, ...]) -> tuple[str, ...]:
        seen: dict[Variant, str] = {}
        for text in variants:
            try:
                seen.setdefault(parse_variant(text), text.strip())
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return tuple(seen.values())
