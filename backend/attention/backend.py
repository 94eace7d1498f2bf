"""`AttentionBackend`: how a layer writes its keys and values to the paged cache and attends over them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from backend.attention.metadata import AttentionMetadata, LayerCache


class AttentionBackend(Protocol):
    def write(
        self, query: Tensor, key: Tensor, value: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Store `key` and `value` ([num_tokens, num_kv_heads, head_dim]) at the batch's slots.

        Returns `query` ([num_tokens, num_heads, head_dim]) as it meets keys that are stored rotated.
        """
        ...

    def forward(self, query: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Causal attention of `query`, as `write` gave it, over the cache; same shape out. Nodes of a tree see their ancestors.

        Keys and values are read as they are stored, those of this step included.
        """
        ...
