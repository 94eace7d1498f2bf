"""Where the tokens of a speculative round stand, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RoundPositions(NamedTuple):
    """A round is a matrix whose rows hold a request's last token and its drafts, in `width` columns. Its tokens, row by row and
    packed, are those of a step; what is behind them, and a row without a request, is padding."""

    starts: Tensor  # int64 [num_rows], each row's first token; 0 of a row without a request
    sources: Tensor  # int64 [num_rows * width], the place in the matrix of each token, then zeros
    places: Tensor  # int64 [num_rows, width], the token of each place in the matrix; a row's last one where it has none, or 0
    positions: Tensor  # int64 [num_rows * width], then zeros
    slot_mappings: Tensor  # int64 [num_groups, num_rows * width], then zeros
    # Of each place in the matrix, column by column; 0 where there is no token.
    pass_positions: Tensor  # int64 [width, num_rows]
    pass_slot_mappings: Tensor  # int64 [num_groups, width, num_rows]
    pass_seq_lens: Tensor  # int32 [width, num_rows]
    query_start_loc: Tensor  # int32 [num_rows + 1], leading 0
    seq_lens: Tensor  # int32 [num_rows], drafts included


def round_positions(
    counts: Tensor, num_computed: Tensor, block_tables: Tensor, width: int, block_size: int
) -> RoundPositions:
    """Lay out a round.

    Args:
        counts: int64 [num_rows], drafts of each row, below `width`
        num_computed: int64 [num_rows], tokens before each row's last one; negative for a row without a request
        block_tables: int32 [num_groups, num_rows, max_num_blocks]
        width: columns, at least 1
        block_size: tokens per block
    Returns:
        `RoundPositions`; nothing is mutated.
    """
    num_rows, num_groups = len(counts), len(block_tables)
    columns = torch.arange(width, device=counts.device)
    is_request = num_computed >= 0
    lengths = torch.where(is_request, counts + 1, 0)
    ends = lengths.cumsum(0)
    begins = ends - lengths
    is_token = columns < lengths[:, None]
    positions = (num_computed[:, None] + columns) * is_token
    blocks = block_tables.gather(2, (positions // block_size).expand(num_groups, -1, -1)).long()
    slots = (blocks * block_size + positions % block_size) * is_token
    # Tokens keep their order, and padding goes behind them.
    order = torch.argsort((~is_token).flatten().int(), stable=True)
    places = begins[:, None] + torch.minimum(columns, counts[:, None])
    return RoundPositions(
        starts=begins * is_request,
        sources=order * is_token.flatten()[order],
        places=places * is_request[:, None],
        positions=positions.flatten()[order],
        slot_mappings=slots.flatten(1)[:, order],
        pass_positions=positions.t().contiguous(),
        pass_slot_mappings=slots.transpose(1, 2).contiguous(),
        pass_seq_lens=((positions + 1) * is_token).t().int().contiguous(),
        query_start_loc=torch.cat((ends.new_zeros(1), ends)).int(),
        seq_lens=torch.where(is_request, num_computed + lengths, 0).int().view(num_rows),
    )
