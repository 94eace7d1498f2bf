"""KV groups: layers whose blocks have one table and one lifetime.

One pool serves all groups of a model, with blocks of one size in bytes. So any block can go to any group, and memory is not
divided up front between layers that keep everything and layers with a window, which no fixed share would suit: a short request
needs as many blocks of the one as of the other, a long one almost only of the first. Where the two kinds of layers are not
equally many, they are cut into groups of equally many layers (the idea of vLLM's hybrid KV cache manager).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backend.core.kv_format import PLAIN, KVFormat

# Each group costs a block table in every step.
MAX_GROUPS = 8


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers whose KV has one shape and one lifetime. A block id addresses the same slot in each of them."""

    num_layers: int  # those that only pad the group to the size of the others among them
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int  # of an element in the model's dtype
    window: int | None = None  # tokens that a token attends to, itself included; None: all
    format: KVFormat = PLAIN
    draft_bytes_per_token: int = 0  # of a draft model's layers, which have slots in the same blocks

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers of the group, with their scales, and those of a draft model."""
        per_vector = self.format.bytes_per_vector(self.head_dim, self.dtype_bytes)
        return 2 * self.num_layers * self.num_kv_heads * per_vector + self.draft_bytes_per_token


class LayerGroup(NamedTuple):
    window: int | None
    layers: tuple[int, ...]  # ascending


def group_layers(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """The groups of a model whose layers have these windows; those without a window come first.

    All have as many layers as the first one, or fewer: the rest is padding. Of the sizes that make at most `MAX_GROUPS`
    groups, it is the one that pads least, and of those the largest.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)

    def num_groups(size: int) -> int:
        return sum(-(-len(layers) // size) for layers in kinds.values())

    sizes = range(1, max(len(layers) for layers in kinds.values()) + 1)
    allowed = [size for size in sizes if num_groups(size) <= max(MAX_GROUPS, len(kinds))]
    size = min(allowed, key=lambda size: (size * num_groups(size), -size))
    return tuple(
        LayerGroup(window, tuple(layers[begin : begin + size]))
        for window, layers in sorted(kinds.items(), key=lambda item: item[0] or 0)
        for begin in range(0, len(layers), size)
    )
