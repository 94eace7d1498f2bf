"""The likeliest token of each row, in plain torch."""

from __future__ import annotations

from torch import Tensor


def greedy_tokens(logits: Tensor, vocabulary: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Take each row's largest logit, the lowest id among equals.

    Args:
        logits: float32 [num_rows, vocab_size]
        vocabulary: int64 [vocab_size], ascending, the id of each column's token; by default the column
    Returns:
        token_ids int64 [num_rows], and finite bool [num_rows]: False where a logit is NaN or the largest is infinite, and
        then the token is some id of the vocabulary. Nothing is mutated.
    """
    # NaN counts as the largest, so the maximum tells all.
    largest, token_ids = logits.max(dim=-1)
    if vocabulary is not None:
        token_ids = vocabulary[token_ids]
    return token_ids, largest.isfinite()
