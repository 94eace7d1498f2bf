"""The likeliest few tokens of each row, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def top_tokens(logits: Tensor, width: int, vocabulary: Tensor | None = None) -> Tensor:
    """Take each row's largest logits, as many as `width`, in falling order, and among equals the lowest id first.

    Args:
        logits: float32 [num_rows, vocab_size]; NaN counts as the smallest
        width: 1 to vocab_size
        vocabulary: int64 [vocab_size], the id of each column's token; by default the column
    Returns:
        token_ids int64 [num_rows, width], different ones in a row. Nothing is mutated.
    """
    finite = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0  # no -0.0, which is equal
    keys = finite.view(torch.int32)
    keys = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys)  # whole numbers in the order of the logits
    columns = []
    for _ in range(width):
        columns.append(keys.argmax(dim=-1, keepdim=True))
        keys.scatter_(1, columns[-1], -(2**31))  # below all, so that it is not found again
    found = torch.cat(columns, dim=1)
    return found if vocabulary is None else vocabulary[found]
