"""What a verified round leaves for the next step, in plain torch."""

from __future__ import annotations

from torch import Tensor


def settle_round(
    ids: Tensor, rows: Tensor, starts: Tensor, sources: Tensor, last_token_ids: Tensor, num_computed: Tensor
) -> tuple[Tensor, Tensor]:
    """Make the last token of each row of a round its last one in the batch, and say what follows each token of the step.

    `last_token_ids[rows[r]] = ids[r, num_accepted[r]]`, finite or not, for the next step may be under way already; and with
    `sources[t] = r * (k + 1) + j`, `next_token_ids[t] = ids[r, j]`, or 0 where nothing follows because a token was rejected.
    `num_computed[r]` goes on by `num_accepted[r] + 1`, unless it is negative.

    Args:
        ids: int64 [num_rows, 2 * k + 3], as `verify_chain` leaves them
        rows: int64 [num_rows], below num_batch_rows; only padding may share one
        starts: int64 [num_rows], each row's first token in the step
        sources: int64 [num_tokens], the place of each token in the matrix of num_rows x (k + 1)
        last_token_ids: int64 [num_batch_rows]; mutated
        num_computed: int64 [num_rows], tokens before each row's last one; negative: there is no request; mutated
    Returns:
        next_token_ids int64 [num_tokens], and last_indices int64 [num_rows]: `starts + num_accepted`.
    """
    k = (ids.shape[1] - 3) // 2
    num_accepted = ids[:, k + 1]
    last_token_ids.index_copy_(0, rows, ids.gather(1, num_accepted[:, None])[:, 0])
    num_computed += (num_accepted + 1) * (num_computed >= 0)
    next_token_ids = ids[:, : k + 1].clamp(min=0).view(-1).index_select(0, sources)
    return next_token_ids, starts + num_accepted
