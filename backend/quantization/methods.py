"""`quantization.method` by name, with what the settings leave open filled in for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from backend.config import QuantizationSettings
from backend.errors import ConfigError
from backend.quantization.base import QuantMethod
from backend.quantization.group_size import check_group_size, default_group_size
from backend.quantization.int4 import Int4
from backend.quantization.int8 import Int8


def resolve_settings(settings: QuantizationSettings, layers: Mapping[str, int]) -> QuantizationSettings:
    """Fill in the defaults of the method. Raises `ConfigError` for a group size that does not fit the model.

    Args:
        layers: projections to quantize, name -> number of inputs.
    """
    if settings.method != "int4":
        return settings
    group_size = settings.group_size if settings.group_size is not None else default_group_size(layers.values())
    check_group_size(group_size, layers)
    return settings.with_overrides(
        {"bits": settings.bits or 4, "group_size": group_size, "zero_point": settings.zero_point or "float"}
    )


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
