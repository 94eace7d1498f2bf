"""What a checkpoint's `quantization_config` says of its layers, in the form of the compressed-tensors library (0.20).

Read and written as plain JSON: neither torch nor that library is needed. What computes something else than is said here
(activations, KV caches, rotations, sparsity) is refused by name, never ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from backend.models.json_fields import JsonFields, shown
from backend.quantization.group_size import CHANNEL

Format = Literal["pack-quantized", "int-quantized", "float-quantized"]
FORMATS: tuple[Format, ...] = ("pack-quantized", "int-quantized", "float-quantized")
ScaleOf = Literal["group", "channel", "tensor"]
ActivationScaleOf = Literal["token", "tensor"]

QUANT_METHOD = "compressed-tensors"
HEAD = "lm_head"
_VERSION = "0.20.0"  # of the library whose form this is
_LINEAR = "Linear"  # a target that names the class: all linear layers, the output head too
_REGEX = "re:"
_MOST_GROUPS = 64
T = TypeVar("T")

_STRATEGIES: tuple[ScaleOf, ...] = ("group", "channel", "tensor")


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """How the weight of a linear layer is stored.

    Attributes:
        group_size: inputs that share a scale, or `CHANNEL`.
        symmetric: codes lie around the middle of their range; otherwise around a stored code per group.
        activation_scale_of: inputs are rounded to the weight's type as they come, with a scale for each token or one for all;
            None: they stay as they are.
    """

    format: Format
    bits: int
    scale_of: ScaleOf
    group_size: int = CHANNEL
    symmetric: bool = True
    activation_scale_of: ActivationScaleOf | None = None

    def __str__(self) -> str:
        kind = "float" if self.format == "float-quantized" else "int"
        of = f"groups of {self.group_size}" if self.scale_of == "group" else f"a scale per {self.scale_of}"
        zeros = "" if self.symmetric else ", zero points"
        activations = f", activations too, per {self.activation_scale_of}" if self.activation_scale_of else ""
        return f"{self.format}, {kind}{self.bits}, {of}{zeros}{activations}"

    def to_dict(self) -> dict[str, Any]:
        """A group of the config, its targets aside."""
        kind = "float" if self.format == "float-quantized" else "int"
        activations = {
            "num_bits": self.bits,
            "type": kind,
            "symmetric": True,
            "strategy": self.activation_scale_of,
            "group_size": None,
            "dynamic": True,
        }
        return {
            "format": self.format,
            "weights": {
                "num_bits": self.bits,
                "type": kind,
                "symmetric": self.symmetric,
                "strategy": self.scale_of,
                "group_size": self.group_size if self.scale_of == "group" else None,
                "dynamic": False,
            },
            "input_activations": activations if self.activation_scale_of else None,
            "output_activations": None,
        }


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Of a checkpoint. Targets and ignored names are those of linear layers, of their class, or `re:` and a pattern."""

    groups: tuple[tuple[tuple[str, ...], StoredScheme], ...]
    ignore: tuple[str, ...] = ()

    def scheme_of(self, name: str) -> StoredScheme | None:
        """How a linear layer is stored; None: as it is. A name goes before a pattern, and that before the class."""
        if any(_matches(pattern, name) for pattern in self.ignore):
            return None
        found = [
            (_rank(target), target, scheme)
            for targets, scheme in self.groups
            for target in targets
            if _matches(target, name)
        ]
        return min(found, key=lambda match: match[:2])[2] if found else None

    def to_dict(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        formats = {scheme.format for _, scheme in self.groups}
        return {
            "quant_method": QUANT_METHOD,
            "version": _VERSION,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{index}": {"targets": list(targets)} | scheme.to_dict()
                for index, (targets, scheme) in enumerate(self.groups)
            },
            "ignore": list(self.ignore),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def all_layers_but(scheme: StoredScheme, ignored: tuple[str, ...]) -> StoredQuantization:
    """Every linear layer in one scheme, but for the output head and `ignored`, which are names."""
    return StoredQuantization((((_LINEAR,), scheme),), (*ignored, HEAD))


def read_quantization(fields: JsonFields) -> StoredQuantization | None:
    """Of a config.json; None where it has no `quantization_config`.

    Raises:
        ModelError: it is malformed, or something in it is not supported.
    """
    config = fields.table("quantization_config")
    if config is None:
        return None
    method = config.text("quant_method", "unnamed")
    _one_of(config, "quantization_config.quant_method", method, (QUANT_METHOD,))
    _one_of(config, "quantization_status", config.text("quantization_status", "compressed"), ("compressed",))
    for key, what in (
        ("kv_cache_scheme", "KV caches in the scales of a checkpoint"),
        ("sparsity_config", "sparse weights"),
        ("transform_config", "rotated weights"),
    ):
        if config.get(key) not in (None, {}):
            config.refuse(key, f"{what} are")
    groups = config.table("config_groups")
    if groups is None or not 1 <= len(groups.data) <= _MOST_GROUPS:
        raise config.error(f"config_groups does not name 1 to {_MOST_GROUPS} groups of layers")
    stored = StoredQuantization(
        tuple(_read_group(groups, name, config.text("format", "unnamed")) for name in groups.data),
        _patterns(config, "ignore") if config.get("ignore") is not None else (),
    )
    if stored.scheme_of(HEAD) is not None:
        raise config.error(f"a quantized output head is not supported: config_groups names {HEAD}, and ignore does not")
    return stored


def _read_group(groups: JsonFields, name: str, default_format: str) -> tuple[tuple[str, ...], StoredScheme]:
    group = groups.table(name)
    weights = group.table("weights") if group is not None else None
    if group is None or weights is None:
        raise groups.error(f"{name} of config_groups says nothing of weights")
    group.refuse("output_activations", "quantized outputs of layers are")
    stored_as: Format = _one_of(group, "quantization format", group.text("format", default_format), FORMATS)
    kind = "float" if stored_as == "float-quantized" else "int"
    _one_of(weights, f"type of {stored_as} weights", weights.text("type", "int").lower(), (kind,))
    least = 2 if stored_as == "pack-quantized" else 8
    bits = weights.integer("num_bits", 8, least=least, most=8)
    if weights.get("dynamic") not in (None, False):
        raise weights.error("weights that are quantized at run time (dynamic) are not supported")
    if weights.get("actorder") not in (None, False):
        _one_of(weights, "actorder", weights.text("actorder", ""), ("weight", "static"))
    has_group_size = weights.get("group_size") not in (None, CHANNEL)
    strategy = weights.text("strategy", "group" if has_group_size else "channel")
    allowed: tuple[ScaleOf, ...] = _STRATEGIES if stored_as != "float-quantized" else _STRATEGIES[1:]
    scale_of: ScaleOf = _one_of(weights, f"strategy of {stored_as} weights", strategy, allowed)
    symmetric = weights.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise weights.error("zero points of float weights are not supported")
    return _patterns(group, "targets"), StoredScheme(
        format=stored_as,
        bits=bits,
        scale_of=scale_of,
        group_size=weights.integer("group_size", most=2**20) if scale_of == "group" else CHANNEL,
        symmetric=symmetric,
        activation_scale_of=_read_activations(group, stored_as, kind, symmetric),
    )


def _read_activations(group: JsonFields, stored_as: str, kind: str, symmetric: bool) -> ActivationScaleOf | None:
    activations = group.table("input_activations")
    if activations is None:
        if stored_as == "float-quantized":
            raise group.error("float-quantized weights without input_activations are not supported")
        return None
    if stored_as == "pack-quantized" or not symmetric:
        zeros = "" if symmetric else " with zero points"
        raise group.error(f"input_activations beside {stored_as} weights{zeros} are not supported")
    found = {
        "type": activations.text("type", "int").lower(),
        "num_bits": activations.integer("num_bits", 8, most=64),
        "dynamic": activations.get("dynamic"),
        "symmetric": activations.flag("symmetric", True),
    }
    wanted = {"type": kind, "num_bits": 8, "dynamic": True, "symmetric": True}
    if found != wanted:
        differing = ", ".join(f"{key} {shown(value)}" for key, value in found.items() if wanted[key] != value)
        raise group.error(
            f"input_activations with {differing} are not supported; supported: {kind}8, dynamic, symmetric"
        )
    strategy = activations.text("strategy", "token")
    allowed: tuple[ActivationScaleOf, ...] = ("token",) if kind == "int" else ("token", "tensor")
    scale_of: ActivationScaleOf = _one_of(
        activations, f"strategy of activations beside {stored_as} weights", strategy, allowed
    )
    return scale_of


def _patterns(fields: JsonFields, key: str) -> tuple[str, ...]:
    values = fields.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise fields.error(f"{key} is not a list of names")
    for value in values:
        try:
            re.compile(value.removeprefix(_REGEX))
        except re.error:
            if value.startswith(_REGEX):
                raise fields.error(f"{key} has {shown(value)}, which is not a regular expression") from None
    return tuple(values)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(_REGEX):
        return re.match(pattern.removeprefix(_REGEX), name) is not None
    return pattern in (name, _LINEAR)


def _rank(target: str) -> int:
    return 2 if target == _LINEAR else int(target.startswith(_REGEX))


def _one_of(fields: JsonFields, what: str, value: str, supported: tuple[T, ...]) -> T:
    for known in supported:
        if known == value:
            return known
    raise fields.error(f"{what} {shown(value)} is not supported; supported: {', '.join(map(str, supported))}")
