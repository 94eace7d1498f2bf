"""Which executor runs a loaded decoder: the fused kernels on CUDA, or its own modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from backend.attention.backend import AttentionBackend
from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.config import KernelSettings
from backend.layers.ops import REFERENCE_OPS, LayerOps
from backend.models.decoder import Decoder, DecoderLayer
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

    def run_layer(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        attention: AttentionBackend,
    ) -> Tensor:
        """A layer more, of the shape of the model's own, on float [num_tokens, hidden], which may be overwritten."""
        ...

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """What `forward` gives after the final norm, float [num_rows, hidden]."""
        ...

    def compute_logits(self, hidden: Tensor, *, output: Tensor | None = None) -> Tensor:
        """float [num_rows, hidden] -> float32 [num_rows, vocab_size], in `output` if there is one."""
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

    def run_layer(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        layer_cache: LayerCache,
        metadata: AttentionMetadata,
        attention: AttentionBackend,
    ) -> Tensor:
        return layer(hidden, metadata.positions, self._model.cos_sin_cache, layer_cache, metadata, attention)

    def final_hidden(self, hidden: Tensor) -> Tensor:
        return hidden

    def compute_logits(self, hidden: Tensor, *, output: Tensor | None = None) -> Tensor:
        logits = self._model.compute_logits(hidden)
        return logits if output is None else output.copy_(logits)


def make_decoder(model: Decoder, kernels: KernelSettings) -> tuple[StepDecoder, AttentionBackend]:
    """The executor that the resolved settings ask for, and the attention that goes with it."""
    if kernels.backend == "reference":
        return ReferenceDecoder(model), ReferenceAttention()
    from backend.attention.triton import TritonAttention  # needs triton, which a CPU does without
    from backend.models.triton_decoder import TritonDecoder

    batch_invariant = kernels.batch_invariant
    return TritonDecoder(model, batch_invariant=batch_invariant), TritonAttention(batch_invariant)


def layer_ops(kernels: KernelSettings) -> LayerOps:
    """For layers beside those of the decoder, such as a head's."""
    if kernels.backend == "reference":
        return REFERENCE_OPS
    from backend.layers.few_token_linear import few_token_linear
    from kernels.ops.norm_embedding_and_features import norm_embedding_and_features
    from kernels.ops.rms_norm import rms_norm
    from kernels.ops.silu_and_mul import silu_and_mul

    return replace(
        REFERENCE_OPS,
        rms_norm=rms_norm,
        silu_and_mul=silu_and_mul,
        norm_embedding_and_features=norm_embedding_and_features,
        linear=few_token_linear,
    )
