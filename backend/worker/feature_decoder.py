"""`FeatureDecoder`: a target's decoder whose every pass leaves the features that an EAGLE head reads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.models.decoder import DecoderLayer
from backend.models.feature_taps import FeatureTaps
from backend.spec_decode.heads.eagle import EagleHead
from backend.worker.decoders import StepDecoder


class FeatureDecoder:
    """A `StepDecoder`. The hidden states behind several layers are fused at once: one in place of several is kept.

    Attributes:
        features: float [num_tokens, hidden], of the last pass; None before the first.
    """

    def __init__(self, decoder: StepDecoder, head: EagleHead, feature_layers: Sequence[int], embedding: Tensor) -> None:
        """Args:
        embedding: the target's.
        """
        self._decoder = decoder
        self._head = head
        self._layers = tuple(feature_layers)
        self._embedding = embedding
        self.features: Tensor | None = None

    @property
    def launch_bound(self) -> bool:
        return self._decoder.launch_bound

    def forward(
        self,
        token_ids: Tensor,
        rows: Tensor,
        sampled_token_ids: Tensor,
        layer_caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        attention: AttentionBackend,
        taps: FeatureTaps | None = None,
    ) -> Tensor:
        assert taps is None  # it has its own
        taps = FeatureTaps.empty(self._layers, len(token_ids), self._embedding)
        hidden = self._decoder.forward(token_ids, rows, sampled_token_ids, layer_caches, metadata, attention, taps=taps)
        self.features = self._head.fuse(taps.states)
        return hidden

    def run_layer(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        attention: AttentionBackend,
    ) -> Tensor:
        return self._decoder.run_layer(layer, hidden, layer_cache, metadata, attention)

    def final_hidden(self, hidden: Tensor) -> Tensor:
        return self._decoder.final_hidden(hidden)

    def compute_logits(self, hidden: Tensor, *, output: Tensor | None = None) -> Tensor:
        return self._decoder.compute_logits(hidden, output=output)
