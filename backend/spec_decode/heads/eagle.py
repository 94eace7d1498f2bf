"""`EagleHead`: one decoder layer that continues the target's hidden states by itself.

After Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025): the
features of a token are several of the target's hidden states fused by a linear layer; the head reads them beside the
embedding of the token that came next, and predicts the token after that. Behind the last known token its own output stands in
for the features. Unlike there, the two inputs are joined by a linear layer, as in DeepSeek-V3's multi-token prediction
(2024), so that what follows is a decoder layer of the target's own shape, KV cache and kernels.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.layers.linear import Linear
from backend.layers.ops import REFERENCE_OPS, LayerOps
from backend.layers.rms_norm import RMSNorm
from backend.models.decoder import DecoderLayer
from backend.models.model_config import DecoderConfig


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high one, as EAGLE-3 takes them; each is the hidden state behind that many layers."""
    return tuple(sorted({min(2, num_layers), num_layers // 2 or 1, max(1, num_layers - 3)}))


class EagleHead(nn.Module):
    """Parameters are uninitialised until loaded or `initialize`d. Nothing here waits for the device.

    Its entry of position i holds token i + 1 beside the features of token i, and predicts token i + 2.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_features: int,
        *,
        ops: LayerOps = REFERENCE_OPS,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Args:
        config: the target's.
        num_features: hidden states that are fused.
        """
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps

        def norm() -> RMSNorm:
            return RMSNorm(size, eps, ops=ops, dtype=dtype, device=device)

        def linear(num_inputs: int) -> Linear:
            return Linear(num_inputs * size, size, bias=False, dtype=dtype, device=device)

        self._ops = ops
        self.num_features = num_features
        self.state_norm = norm()  # one for all states: the fusion behind it scales each by itself
        self.fusion = linear(num_features)
        self.embedding_norm = norm()
        self.feature_norm = norm()
        self.joint = linear(2)
        own = replace(config, num_layers=1, sliding_window=None, sliding_layers=(), stored_quantization=None)
        self.layer = DecoderLayer(own, ops=ops, dtype=dtype, device=device, linear_device=device)
        self.final_norm = norm()

    def fuse(self, states: Tensor) -> Tensor:
        """Hidden states of the target, float [num_tokens, num_features, hidden], to features [num_tokens, hidden]."""
        normed = self.state_norm(states.flatten(0, 1)).view(states.shape[0], -1)
        return self._ops.linear(self.fusion, normed, None)

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        attention: AttentionBackend,
    ) -> Tensor:
        """Run entries through the layer, which stores their keys and values.

        Args:
            embedded: float [num_tokens, hidden], of each entry's token: the one behind its position.
            features: float [num_tokens, hidden], what `fuse` or an earlier `forward` gave for its position.
            positions: int64 [num_tokens], of the entries.
            cos_sin_cache: the target's.
            layer_cache: the head's own, a layer more beside the target's.
        Returns:
            float [num_tokens, hidden]: the features of the next position, and, after `final_norm`, what the target's output
            head makes logits of.
        """
        joined = self.join(embedded, features)
        return self.layer(joined, positions, cos_sin_cache, layer_cache, metadata, attention)

    def join(self, embedded: Tensor, features: Tensor) -> Tensor:
        """What the layer takes of an entry's two halves; shapes as in `forward`."""
        return self.joint(torch.cat((self.embedding_norm(embedded), self.feature_norm(features)), dim=-1))

    def join_tokens(self, token_ids: Tensor, embedding: Tensor, features: Tensor) -> Tensor:
        """`join` without gradients, of tokens int64 [num_tokens] yet to be looked up in the target's embedding."""
        normed = self._ops.norm_embedding_and_features(
            token_ids,
            embedding,
            self.embedding_norm.weight,
            features,
            self.feature_norm.weight,
            self.embedding_norm.eps,
        )
        return self._ops.linear(self.joint, normed, None)

    @torch.no_grad()
    def initialize(self, final_norm: Tensor, generator: torch.Generator) -> None:
        """Draw weights that keep a unit scale; only the last norm is the target's, float [hidden].

        Args:
            generator: on the CPU, so that a seed gives the same weights for every device.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        self.final_norm.weight.copy_(final_norm)
