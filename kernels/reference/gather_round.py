"""The tokens of a step that verifies drafts, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_round(last_token_ids: Tensor, drafts: Tensor, rows: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's last token and its drafts, as the tokens of one step.

    In the matrix of num_rows x (k + 1), row r is `last_token_ids[rows[r]]` and `drafts[rows[r]]` behind it; the step has the
    places of it that `sources` says.

    Args:
        last_token_ids: int64 [num_batch_rows]
        drafts: int64 [num_batch_rows, k], k at least 1
        rows: int64 [num_rows], below num_batch_rows
        sources: int64 [num_tokens], below num_rows * (k + 1)
    Returns:
        token_ids int64 [num_tokens], and draft_token_ids int64 [num_rows, k]: `drafts[rows]`. Nothing is mutated.
    """
    draft_token_ids = drafts.index_select(0, rows)
    matrix = torch.cat((last_token_ids.index_select(0, rows)[:, None], draft_token_ids), dim=1)
    return matrix.view(-1).index_select(0, sources), draft_token_ids
