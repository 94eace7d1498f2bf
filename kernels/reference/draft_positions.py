"""Where the tokens stand that are drafted behind a verified round, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def draft_positions(
    starts: Tensor,
    counts: Tensor,
    last_indices: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    num_passes: int,
    block_size: int,
    max_model_len: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Length, position and slots of a token for each pass and request, one behind the other from what was accepted on.

    `length[p, r] = seq_lens[r] - counts[r] + (last_indices[r] - starts[r]) + 1 + p`, within 0..max_model_len, and 0 for a
    padding row of length 0; `position = max(length - 1, 0)`, `slot[g, p, r] = block_tables[g, r, position // block_size] *
    block_size + position % block_size`, or 0 where the length is 0.

    Args:
        starts: int64 [num_reqs], each request's first token in the round
        counts: int64 [num_reqs], drafts that were verified
        last_indices: int64 [num_reqs], each request's last token that was not rejected
        seq_lens: int32 [num_reqs], with all drafts
        block_tables: int32 [num_groups, num_reqs, max_num_blocks]
        num_passes: tokens of each request
        block_size: tokens per block
        max_model_len: longest request, in tokens
    Returns:
        seq_lens int32 [num_passes, num_reqs], positions int64 [num_passes, num_reqs], slot_mappings int64 [num_groups,
        num_passes, num_reqs]; nothing is mutated.
    """
    num_verified = seq_lens + last_indices - starts - counts
    ahead = torch.arange(1, num_passes + 1, device=seq_lens.device)[:, None]
    lengths = (num_verified + ahead).clamp(min=0, max=max_model_len).where(seq_lens > 0, 0)
    positions = (lengths - 1).clamp(min=0)
    columns = (positions // block_size).t().expand(len(block_tables), -1, -1)
    block_ids = block_tables.gather(2, columns).transpose(1, 2).long()
    slots = torch.where(lengths > 0, block_ids * block_size + positions % block_size, 0)
    return lengths.int(), positions, slots
