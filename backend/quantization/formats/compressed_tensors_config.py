"""A `quantization_config` in the form of the compressed-tensors library (0.20).

What computes something else than is said here (activations, KV caches, rotations, sparsity) is refused by name, never ignored.
"""

from __future__ import annotations

import re

from backend.models.json_fields import JsonFields, shown
from backend.quantization.formats.scheme import (
    REGEX,
    ActivationScaleOf,
    Format,
    ScaleOf,
    StoredQuantization,
    StoredScheme,
)
from backend.quantization.group_size import CHANNEL

_FORMATS: tuple[Format, ...] = ("pack-quantized", "int-quantized", "float-quantized")
_STRATEGIES: tuple[ScaleOf, ...] = ("group", "channel", "tensor")
_MOST_GROUPS = 64


def read_compressed_tensors(config: JsonFields) -> StoredQuantization:
    """Raise `ModelError` where it is malformed, or something in it is not supported."""
    config.one_of("quantization_status", config.text("quantization_status", "compressed"), ("compressed",))
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
    return StoredQuantization(
        tuple(_read_group(groups, name, config.text("format", "unnamed")) for name in groups.data),
        _patterns(config, "ignore") if config.get("ignore") is not None else (),
    )


def _read_group(groups: JsonFields, name: str, default_format: str) -> tuple[tuple[str, ...], StoredScheme]:
    group = groups.table(name)
    weights = group.table("weights") if group is not None else None
    if group is None or weights is None:
        raise groups.error(f"{name} of config_groups says nothing of weights")
    group.refuse("output_activations", "quantized outputs of layers are")
    stored_as: Format = group.one_of("quantization format", group.text("format", default_format), _FORMATS)
    kind = "float" if stored_as == "float-quantized" else "int"
    weights.one_of(f"type of {stored_as} weights", weights.text("type", "int").lower(), (kind,))
    least = 2 if stored_as == "pack-quantized" else 8
    bits = weights.integer("num_bits", 8, least=least, most=8)
    if weights.get("dynamic") not in (None, False):
        raise weights.error("weights that are quantized at run time (dynamic) are not supported")
    if weights.get("actorder") not in (None, False):
        weights.one_of("actorder", weights.text("actorder", ""), ("weight", "static"))
    has_group_size = weights.get("group_size") not in (None, CHANNEL)
    strategy = weights.text("strategy", "group" if has_group_size else "channel")
    allowed: tuple[ScaleOf, ...] = _STRATEGIES if stored_as != "float-quantized" else _STRATEGIES[1:]
    scale_of: ScaleOf = weights.one_of(f"strategy of {stored_as} weights", strategy, allowed)
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
    scale_of: ActivationScaleOf = activations.one_of(
        f"strategy of activations beside {stored_as} weights", strategy, allowed
    )
    return scale_of


def _patterns(fields: JsonFields, key: str) -> tuple[str, ...]:
    values = fields.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise fields.error(f"{key} is not a list of names")
    for value in values:
        try:
            re.compile(value.removeprefix(REGEX))
        except re.error:
            if value.startswith(REGEX):
                raise fields.error(f"{key} has {shown(value)}, which is not a regular expression") from None
    return tuple(values)
