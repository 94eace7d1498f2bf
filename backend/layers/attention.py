"""Self-attention over the paged cache: merged projections around an `AttentionBackend`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.layers.linear import Linear
from backend.layers.ops import LayerOps
from backend.layers.rms_norm import RMSNorm
from backend.models.model_config import DecoderConfig


class Attention(nn.Module):
    def __init__(
        self,
        config: DecoderConfig,
        *,
        ops: LayerOps,
        dtype: torch.dtype,
        device: torch.device,
        linear_device: torch.device,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.head_counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)  # query, key, value
        self.scale = config.head_dim**-0.5
        attended_size, bias = config.num_heads * config.head_dim, config.attention_bias
        qkv_size, qkv_bias = sum(self.head_counts) * config.head_dim, bias or config.qkv_bias
        self.qkv = Linear(config.hidden_size, qkv_size, bias=qkv_bias, dtype=dtype, device=linear_device)
        self.output = Linear(attended_size, config.hidden_size, bias=bias, dtype=dtype, device=linear_device)
        self.q_norm: RMSNorm | None = None  # of each head by itself, as k_norm; both or none
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops=ops, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops=ops, dtype=dtype, device=device)
        self._ops = ops

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        attention: AttentionBackend,
    ) -> Tensor:
        """float [num_tokens, hidden] -> same; the tokens' keys and values are stored in `layer_cache` on the way."""
        heads = self.qkv(hidden).view(-1, sum(self.head_counts), self.head_dim)
        query, key, value = heads.split(self.head_counts, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query = self.q_norm(query.reshape(-1, self.head_dim)).view_as(query)
            key = self.k_norm(key.reshape(-1, self.head_dim)).view_as(key)
        query, key = self._ops.rotary_embedding(query, key, positions, cos_sin_cache)
        query = attention.write(query, key, value, layer_cache, metadata)
        attended = attention.forward(query, layer_cache, metadata, self.scale)
        return self.output(attended.flatten(1))
