"""Tokens' embeddings and the features beside them, each normalised, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.reference.rms_norm import rms_norm


def norm_embedding_and_features(
    token_ids: Tensor,
    embedding: Tensor,
    embedding_norm_weight: Tensor,
    features: Tensor,
    feature_norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """Look each token's embedding up, normalise it and its features, and lay both side by side.

    `y[t] = [rms_norm(embedding[token_ids[t]], embedding_norm_weight), rms_norm(features[t], feature_norm_weight)]`: what
    the joint linear layer of an EAGLE head or of DeepSeek-V3's multi-token prediction reads.

    Args:
        token_ids: int64 [num_tokens], in 0..vocab_size - 1
        embedding: float [vocab_size, hidden]
        embedding_norm_weight: embedding.dtype [hidden]
        features: embedding.dtype [num_tokens, hidden]
        feature_norm_weight: embedding.dtype [hidden]
        eps: added to the mean squares
    Returns:
        embedding.dtype [num_tokens, 2 * hidden]; nothing is mutated.
    """
    embedded = rms_norm(F.embedding(token_ids, embedding), embedding_norm_weight, eps)
    return torch.cat((embedded, rms_norm(features, feature_norm_weight, eps)), dim=-1)
