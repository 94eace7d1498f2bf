"""Where a decode step's tokens stand, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def decode_positions(seq_lens: Tensor, block_table: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Position and slot of the last token of each request.

    `position[r] = seq_lens[r] - 1` and `slot[r] = block_table[r, position // block_size] * block_size + position %
    block_size`; both are 0 for a padding row of length 0.

    Args:
        seq_lens: int32 [num_reqs]
        block_table: int32 [num_reqs, max_num_blocks]
        block_size: tokens per block
    Returns:
        positions int64 [num_reqs], slot_mapping int64 [num_reqs]; nothing is mutated.
    """
    positions = (seq_lens.long() - 1).clamp(min=0)
    block_ids = block_table.gather(1, (positions // block_size)[:, None])[:, 0].long()
    slots = block_ids * block_size + positions % block_size
    return positions, torch.where(seq_lens > 0, slots, 0)
