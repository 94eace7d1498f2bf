"""Which groups a model's layers can be cut into. A group is that many inputs of one output, with a scale of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd

from backend.errors import ConfigError

CHANNEL = -1  # one scale for all inputs of an output
LEAST = 32  # a tile of a kernel lies within a group


def allowed_group_sizes(in_features: Iterable[int]) -> list[int]:
    """Multiples of 32 that divide the number of inputs of every layer, ascending."""
    common = gcd(*in_features)
    return [size for size in range(LEAST, common + 1, LEAST) if common % size == 0]


def default_group_size(in_features: Iterable[int]) -> int:
    """128, or 64 where that does not divide all layers, else the largest that does below, else `CHANNEL`."""
    allowed = allowed_group_sizes(in_features)
    if 128 in allowed:
        return 128
    return max((size for size in allowed if size <= 64), default=CHANNEL)


def check_group_size(group_size: int, layers: Mapping[str, int]) -> None:
    """Raise `ConfigError` naming the first layer that cannot be cut so, and the sizes that fit all.

    Args:
        layers: name -> number of inputs.
    """
    if group_size == CHANNEL:
        return
    allowed = allowed_group_sizes(layers.values())
    if group_size in allowed:
        return
    fitting = f"allowed for this model: {', '.join(map(str, allowed))}{', ' if allowed else ''}{CHANNEL} (per channel)"
    for name, in_features in layers.items():
        if group_size < 1 or in_features % group_size:
            raise ConfigError(
                f"quantization.group_size = {group_size} does not divide the {in_features:,} inputs of {name}; {fitting}"
            )
    raise ConfigError(f"quantization.group_size = {group_size} is not a multiple of {LEAST}; {fitting}")
