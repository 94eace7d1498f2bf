"""`AttentionBackend`: how a layer writes its keys and values to the paged cache and attends over them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from backend.attention.metadata import AttentionMetadata, LayerCache


class AttentionBackend(Protocol):
    def write(self, key: Tensor, value: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata) -> None:
        """Store `key` and `value` ([num_tokens, num_kv_heads, head_dim]) at the batch's slots."""

    def forward(self, query: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Causal attention of `query` ([num_tokens, num_heads, head_dim]) over the cache; same shape out."""
        ...
