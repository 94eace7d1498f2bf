"""Which executor runs a loaded decoder: the fused kernels on CUDA, or its own modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.config import KernelSettings
from backend.models.decoder import Decoder
from backend.models.feature_taps import FeatureTaps


class StepDecoder(Protocol):
    """Runs a step's tokens through a decoder; `compute_logits` takes what `forward` gives.

    `launch_bound`: a step of any size takes longer to launch, op by op, than to compute.
    """

    @property
    def launch_bound(self) -> bool: ...

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
        """float [num_tokens, hidden] of tokens int64 [num_tokens]; a negative id stands for the row's last sampled one.

        `taps` are filled on the way.
        """
        ...

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """What `forward` gives after the final norm, float [num_rows, hidden]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float [num_rows, hidden] -> float32 [num_rows, vocab_size]."""
        ...


class ReferenceDecoder:
    """The decoder's own modules, over the plain-torch ops."""

    launch_bound = False

    def __init__(self, model: Decoder) -> None:
        self._model = model

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
        token_ids = torch.where(token_ids >= 0, token_ids, sampled_token_ids[rows])
        return self._model(token_ids, metadata.positions, layer_caches, metadata, attention, taps)

    def final_hidden(self, hidden: Tensor) -> Tensor:
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)


def make_decoder(model: Decoder, kernels: KernelSettings) -> tuple[StepDecoder, AttentionBackend]:
    """The executor that the resolved settings ask for, and the attention that goes with it."""
    if kernels.backend == "reference":
        return ReferenceDecoder(model), ReferenceAttention()
    from backend.attention.triton import TritonAttention  # needs triton, which a CPU does without
    from backend.models.triton_decoder import TritonDecoder

    batch_invariant = kernels.batch_invariant
    return TritonDecoder(model, batch_invariant=batch_invariant), TritonAttention(batch_invariant)
