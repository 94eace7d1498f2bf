"""Attention through the Triton kernels: split-KV for single rows, tiles of rows for chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.attention.metadata import AttentionMetadata, LayerCache
from kernels.ops.attention_tiles import TileSizes, tile_sizes
from kernels.ops.paged_attention import paged_attention
from kernels.ops.paged_decode_attention import paged_decode_attention
from kernels.ops.store_kv_cache import store_kv_cache
from kernels.reference.kv_quantization import rotate


class TritonAttention:
    """Args:
    batch_invariant: attend with one tile for every batch, so that a row's sums depend on its own request alone.
    """

    def __init__(self, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant

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
        key_cache, value_cache = layer_cache.key_cache, layer_cache.value_cache
        key_scales, value_scales, window = layer_cache.key_scales, layer_cache.value_scales, layer_cache.window
        if self._batch_invariant:
            return paged_attention(
                query,
                key_cache,
                value_cache,
                metadata.block_table,
                metadata.query_start_loc,
                metadata.seq_lens,
                scale,
                window,
                key_scales=key_scales,
                value_scales=value_scales,
                tree_mask=metadata.tree_mask,
                tree_starts=metadata.tree_starts,
                tiles=_one_tile(query, key_cache),
                num_splits=1,
            )
        num_decodes = metadata.num_decodes
        output = torch.empty_like(query)
        if num_decodes:
            paged_decode_attention(
                query[:num_decodes],
                key_cache,
                value_cache,
                metadata.block_table[:num_decodes],
                metadata.seq_lens[:num_decodes],
                scale,
                window,
                key_scales=key_scales,
                value_scales=value_scales,
                output=output[:num_decodes],
            )
        if num_decodes < query.shape[0]:
            paged_attention(
                query[num_decodes:],
                key_cache,
                value_cache,
                metadata.block_table[num_decodes:],
                metadata.chunk_start_loc,
                metadata.seq_lens[num_decodes:],
                scale,
                window,
                key_scales=key_scales,
                value_scales=value_scales,
                tree_mask=_behind(metadata.tree_mask, num_decodes),
                tree_starts=_behind(metadata.tree_starts, num_decodes),
                output=output[num_decodes:],
                tiles=_chunk_tiles(query, key_cache, metadata),
            )
        return output


def _behind(values: Tensor | None, num_decodes: int) -> Tensor | None:
    return None if values is None else values[num_decodes:]


def _one_tile(query: Tensor, key_cache: Tensor) -> TileSizes:
    group = query.shape[1] // key_cache.shape[2]
    return tile_sizes(query.shape[0], query.shape[0], group, query.shape[2], query.element_size())


def _chunk_tiles(query: Tensor, key_cache: Tensor, metadata: AttentionMetadata) -> TileSizes:
    """For chunks, also where the batch has room for more requests than there are, as in a graph."""
    num_tokens, group = query.shape[0], query.shape[1] // key_cache.shape[2]
    num_chunks = max(1, num_tokens // (metadata.longest_chunk or 64))
    num_chunks = min(metadata.seq_lens.shape[0] - metadata.num_decodes, num_chunks)
    return tile_sizes(num_tokens, num_chunks, group, query.shape[2], query.element_size())
