"""Attention through the plain-torch references: the CPU path, and the CUDA path until kernels replace it."""

from __future__ import annotations

from torch import Tensor

from backend.attention.metadata import AttentionMetadata, LayerCache
from kernels.reference.kv_quantization import rotate
from kernels.reference.paged_attention import paged_attention
from kernels.reference.store_kv_cache import store_kv_cache


class ReferenceAttention:
    def write(
        self, query: Tensor, key: Tensor, value: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        if layer_cache.spec.rotates_keys:
            query, key = rotate(query), rotate(key)
        store_kv_cache(
            key,
            value,
            layer_cache.key_cache,
            layer_cache.value_cache,
            metadata.slot_mapping,
            layer_cache.key_scales,
            layer_cache.value_scales,
        )
        return query

    def forward(self, query: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        return paged_attention(
            query,
            layer_cache.key_cache,
            layer_cache.value_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale,
            layer_cache.window,
            key_scales=layer_cache.key_scales,
            value_scales=layer_cache.value_scales,
            tree_mask=metadata.tree_mask,
            tree_starts=metadata.tree_starts,
        )
