"""Looking up embeddings of tokens that the host may not know yet, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.deferred_norm import DeferredNorm


def embed_tokens(
    token_ids: Tensor,
    rows: Tensor,
    sampled_token_ids: Tensor,
    embedding: Tensor,
    next_norm_weight: Tensor | None = None,
) -> tuple[Tensor, DeferredNorm | None]:
    """The embedding of each token; a negative id stands for the last token sampled in the request's row.

    `y[t] = embedding[token_ids[t]]` where `token_ids[t] >= 0`, else `embedding[sampled_token_ids[rows[t]]]`. With
    `next_norm_weight` also `scaled = cast(y * next_norm_weight)` and each row's sum of squares, as a single part.

    Args:
        token_ids: int64 [num_tokens], below vocab_size
        rows: int64 [num_tokens], the row of each token's request
        sampled_token_ids: int64 [num_rows], in 0..vocab_size - 1
        embedding: float [vocab_size, hidden]
        next_norm_weight: embedding.dtype [hidden]: of the RMS norm that follows
    Returns:
        embedding.dtype [num_tokens, hidden], and the deferred norm if one follows; nothing is mutated.
    """
    ids = torch.where(token_ids >= 0, token_ids, sampled_token_ids[rows])
    hidden = torch.nn.functional.embedding(ids, embedding)
    if next_norm_weight is None:
        return hidden, None
    square_sums = hidden.float().square().sum(dim=1, keepdim=True)
    return hidden, DeferredNorm(hidden * next_norm_weight, square_sums)
