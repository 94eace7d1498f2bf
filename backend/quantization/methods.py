"""`quantization.method` by name, with what the settings leave open filled in for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from backend.config import QuantizationSettings
from backend.errors import ConfigError
from backend.quantization.base import QuantMethod
from backend.quantization.fp8 import FP8
from backend.quantization.group_size import CHANNEL, allowed_group_sizes, check_group_size, default_group_size
from backend.quantization.int4 import Int4
from backend.quantization.int8 import Int8
from backend.quantization.llm_int8 import PAPER_THRESHOLD, LLMInt8
from backend.quantization.nf4 import NF4
from backend.quantization.w8a8_int8 import W8A8Int8


def resolve_settings(settings: QuantizationSettings, layers: Mapping[str, int]) -> QuantizationSettings:
    """Fill in the defaults of the method. Raises `ConfigError` for a group size that does not fit the model.

    Args:
        layers: projections to quantize, name -> number of inputs.
    """
    match settings.method:
        case "int4":
            default = default_group_size(layers.values())
            filled = {"bits": settings.bits or 4, "zero_point": settings.zero_point or "float"}
        case "nf4":
            # The paper's 64, or 32 where that does not divide all layers.
            default = max((size for size in allowed_group_sizes(layers.values()) if size <= 64), default=CHANNEL)
            filled = {}
        case "fp8":
            return settings.with_overrides({"granularity": settings.granularity or "channel"})
        case "llm_int8":
            return settings.with_overrides({"threshold": settings.threshold or PAPER_THRESHOLD})
        case _:
            return settings
    group_size = default if settings.group_size is None else settings.group_size
    check_group_size(group_size, layers)
    return settings.with_overrides(filled | {"group_size": group_size})


def make_method(settings: QuantizationSettings) -> QuantMethod | None:
    """Of resolved settings; None: weights stay as they are."""
    match settings.method:
        case None:
            return None
        case "int8":
            return Int8()
        case "int4":
            assert settings.bits is not None
            assert settings.group_size is not None
            assert settings.zero_point is not None
            return Int4(settings.bits, settings.group_size, settings.zero_point)
        case "fp8":
            assert settings.granularity is not None
            return FP8(settings.granularity)
        case "w8a8_int8":
            return W8A8Int8()
        case "llm_int8":
            assert settings.threshold is not None
            return LLMInt8(settings.threshold)
        case "nf4":
            assert settings.group_size is not None
            return NF4(settings.group_size)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which linear layers are quantized, each a list of projections that lie side by side.

    `notices` say where a pattern left out more than it names.
    """

    quantized: tuple[str, ...]
    skipped: tuple[str, ...]
    notices: tuple[str, ...]


def choose_layers(linears: Mapping[str, tuple[str, ...]], patterns: tuple[str, ...]) -> Chosen:
    """Leave out the layers that a pattern names, whole: projections side by side are one matrix.

    Args:
        linears: layer -> its projections' names.
        patterns: as of `fnmatch`, of projections.
    Raises:
        ConfigError: a pattern names none, or nothing is left.
    """
    names = [name for projections in linears.values() for name in projections]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"quantization.skip = {pattern!r} names no layer of this model; there are {names[0]} .. {names[-1]}"
            )
    quantized, skipped, notices = [], [], []
    for layer, projections in linears.items():
        matching = [name for name in projections if any(fnmatchcase(name, pattern) for pattern in patterns)]
        (skipped if matching else quantized).append(layer)
        if matching and len(matching) < len(projections):
            others = ", ".join(name for name in projections if name not in matching)
            notices.append(f"{others}: not quantized either, as {', '.join(matching)} lies in the same matrix")
    if not quantized:
        raise ConfigError(f"quantization.skip = {list(patterns)!r} leaves no layer to quantize")
    return Chosen(tuple(quantized), tuple(skipped), tuple(notices))
