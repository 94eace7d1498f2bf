"""What a head predicts at every place of known sequences, several tokens ahead, all places side by side.

Chains are told apart by where they start: chain a knows the target's hidden states up to token a and the tokens up to a + 1.
Step s (from 0) predicts token a + s + 2 with the sequence's own tokens as the chain's earlier ones, which is what drafting does
as long as it is right.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.spec_decode.heads.eagle import EagleHead
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.heads.target import DenseTarget, TargetStates, dense_metadata

DraftHead = EagleHead | MedusaHeads


def unroll(
    head: DraftHead, target: DenseTarget, states: TargetStates, token_ids: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """Yield what the target's output head makes each step's logits of, float [num_sequences, length, hidden].

    Of a sequence of n tokens the last s + 2 chains of step s predict nothing that is there; their values mean nothing.

    Args:
        states: of `token_ids`, int64 [num_sequences, length].
        num_steps: no more than a Medusa has heads.
    """
    embedded = F.embedding(token_ids, target.embedding)
    if isinstance(head, MedusaHeads):
        following = embedded.roll(-1, dims=1).flatten(0, 1)
        ahead = head(head.fuse(states.last.flatten(0, 1), following)).unflatten(0, token_ids.shape)
        for step in range(num_steps):
            yield ahead[:, :, step]
        return
    num_sequences, length = token_ids.shape
    features = head.fuse(states.features.flatten(0, 1))
    attention = UnrolledAttention(num_sequences)
    last_position = target.config.max_position_embeddings - 1
    for step in range(num_steps):
        positions = (torch.arange(length, device=token_ids.device) + step).clamp_(max=last_position)
        positions = positions.repeat(num_sequences)
        following = embedded.roll(-(step + 1), dims=1).flatten(0, 1)
        features = head(
            following,
            features,
            positions,
            target.model.cos_sin_cache,
            target.no_cache,
            dense_metadata(num_sequences, positions),
            attention,
        )
        yield head.final_norm(features).unflatten(0, token_ids.shape)


class UnrolledAttention:
    """An `AttentionBackend` for the steps of one unroll, each a `write` and a `forward` over all chains ("training-time test").

    In step s, chain a attends to the first step's entries of places up to a, and to its own of steps 1 to s. So the scores are
    those of plain causal attention and one column more for each further step.
    """

    def __init__(self, num_sequences: int) -> None:
        self._num_sequences = num_sequences
        self._keys: list[Tensor] = []  # of each step, [num_sequences, num_kv_heads, length, head_dim]
        self._values: list[Tensor] = []

    def write(
        self, query: Tensor, key: Tensor, value: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        self._keys.append(self._by_head(key))
        self._values.append(self._by_head(value))
        return query

    def forward(self, query: Tensor, layer_cache: LayerCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        (keys, *own_keys), (values, *own_values) = self._keys, self._values
        queries = self._by_head(query)
        if not own_keys:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
            )
            return attended.transpose(1, 2).flatten(0, 1)
        grouped = queries.unflatten(1, (keys.shape[1], -1)) * scale  # [num_sequences, kv heads, queries of one, ...]
        length = keys.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu_(1)
        scores = (grouped @ keys[:, :, None].transpose(-1, -2)).masked_fill(future, -torch.inf)
        own_scores = [(grouped * key[:, :, None]).sum(dim=-1, keepdim=True) for key in own_keys]
        weights = torch.cat((scores, *own_scores), dim=-1).softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        attended = weights[..., :length] @ values[:, :, None]
        for step, value in enumerate(own_values):
            attended = attended + weights[..., length + step, None] * value[:, :, None]
        return attended.flatten(1, 2).transpose(1, 2).flatten(0, 1)

    def _by_head(self, rows: Tensor) -> Tensor:
        """[num_sequences, heads, length, head_dim]."""
        return rows.unflatten(0, (self._num_sequences, -1)).transpose(1, 2)
