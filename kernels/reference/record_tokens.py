"""Keeping sampled tokens for the next step, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def record_tokens(
    token_ids: Tensor, finite: Tensor, rows: Tensor, sampled_token_ids: Tensor, seq_lens: Tensor | None = None
) -> Tensor:
    """Make each token the last one of its row, and tell the host in one tensor what became of it.

    `sampled_token_ids[rows[i]] = token_ids[i]`; `y[i] = token_ids[i]` where `finite[i]`, else -1. Lengths in `seq_lens`
    grow by one, those of 0 (padding) excepted.

    Args:
        token_ids: int64 [num_sampled]
        finite: bool [num_sampled]
        rows: int64 [num_sampled], below num_rows; only padding may share one
        sampled_token_ids: int64 [num_rows]; mutated
        seq_lens: int32 [num_sampled], lengths that grow with the tokens; mutated
    Returns:
        int64 [num_sampled].
    """
    sampled_token_ids.index_copy_(0, rows, token_ids)
    if seq_lens is not None:
        seq_lens += (seq_lens > 0).int()
    return torch.where(finite, token_ids, -1)
