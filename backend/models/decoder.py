"""The one decoder of all supported models, driven by the features in `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.layers.attention import Attention
from backend.layers.linear import Linear
from backend.layers.mlp import DenseMLP
from backend.layers.ops import REFERENCE_OPS, LayerOps
from backend.layers.quantized_linear import QuantizedLinear
from backend.layers.rms_norm import RMSNorm
from backend.layers.rotary import build_cos_sin_cache
from backend.models.feature_taps import FeatureTaps
from backend.models.model_config import DecoderConfig


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

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
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, eps, ops=ops, dtype=dtype, device=device)
        self.attention = Attention(config, ops=ops, dtype=dtype, device=device, linear_device=linear_device)
        self.mlp_norm = RMSNorm(size, eps, ops=ops, dtype=dtype, device=device)
        self.mlp = DenseMLP(config, ops=ops, dtype=dtype, device=linear_device)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        attention: AttentionBackend,
    ) -> Tensor:
        hidden = hidden + self.attention(
            self.attention_norm(hidden), positions, cos_sin_cache, layer_cache, metadata, attention
        )
        return hidden + self.mlp(self.mlp_norm(hidden))


class Decoder(nn.Module):
    """Embedding, layers, final norm and output head. Parameters are uninitialised until loaded; then call `prepare`."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps = REFERENCE_OPS,
        linear_device: torch.device | None = None,
        head_device: torch.device | None = None,
    ) -> None:
        """Args:
        linear_device: of the linear layers; on "meta" they take no memory, and are to be replaced one by one.
        head_device: the same of an output head that is not tied.
        """
        super().__init__()
        self.config = config
        embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.layers = nn.ModuleList(
            DecoderLayer(config, ops=ops, dtype=dtype, device=device, linear_device=linear_device or device)
            for _ in range(config.num_layers)
        )
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops=ops, dtype=dtype, device=device)
        self.head = Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            dtype=dtype,
            device=head_device or device,
            shared_weight=self.embedding if config.tie_word_embeddings else None,
        )
        self.cos_sin_cache: Tensor
        self.register_buffer("cos_sin_cache", build_cos_sin_cache(config, device), persistent=False)

    def prepare(self) -> None:
        """Lay the loaded weights out for the device; afterwards a `Linear.weight` may be None."""
        for module in self.modules():
            if isinstance(module, Linear | QuantizedLinear):
                module.prepare()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layer_caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        attention: AttentionBackend,
        taps: FeatureTaps | None = None,
    ) -> Tensor:
        """Run one step's tokens through the layers.

        Args:
            token_ids: int64 [num_tokens], the requests' tokens laid end to end as `metadata` says.
            positions: int64 [num_tokens], below `max_position_embeddings`.
            layer_caches: one per layer; the tokens' keys and values are stored in them.
            taps: filled on the way.
        Returns:
            float [num_tokens, hidden], after the final norm.
        """
        hidden = F.embedding(token_ids, self.embedding)
        for index, (layer, layer_cache) in enumerate(zip(self.layers, layer_caches, strict=True), start=1):
            group = metadata.of_group(layer_cache.group)
            hidden = layer(hidden, positions, self.cos_sin_cache, layer_cache, group, attention)
            if taps is not None:
                taps.take(index, hidden)
        return self.final_norm(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float [num_rows, hidden] -> float32 [num_rows, vocab_size]; pass only the rows that are sampled from."""
        return self.head(hidden).float()
