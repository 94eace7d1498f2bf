"""Drafts looked up in each request's own text, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_drafts(
    ids: Tensor,
    rows: Tensor,
    num_granted: Tensor,
    texts: Tensor,
    lengths: Tensor,
    drafts: Tensor,
    counts: Tensor,
    n_min: int,
    n_max: int,
) -> None:
    """Append what came of a round to the texts of its rows, and draft what followed when their ends occurred before.

    Of the longest end of a text, of n_max down to n_min tokens, that occurred before with a token behind it, the last such
    place counts; what follows there is the draft, from its beginning again where it reaches the text's end. That is prompt
    lookup (Saxena 2023, "Prompt lookup decoding").

    Args:
        ids: int64 [num_rows, 2 * k + 3], as `verify_chain` leaves them
        rows: int64 [num_rows], below num_texts; only those that are granted nothing may share one
        num_granted: int64 [num_rows], 0 to k, tokens of a draft that is found; 0: nothing is appended or looked up
        texts: int32 [num_texts, max_len]; mutated
        lengths: int64 [num_texts], tokens of each text; what would lie behind max_len is dropped; mutated
        drafts: int64 [num_rows, k]; written, -1 where nothing is drafted
        counts: int64 [num_rows]; written, `num_granted` or, where nothing was found, 0
        n_min, n_max: shortest and longest end that is looked up
    """
    k, max_len = drafts.shape[1], texts.shape[1]
    places, columns = torch.arange(max_len, device=texts.device), torch.arange(k, device=texts.device)
    is_granted = num_granted > 0
    begins = lengths.index_select(0, rows)[:, None]
    num_new = ((ids[:, k + 1] + 1) * is_granted)[:, None]
    ends = (begins + num_new).clamp(max=max_len)
    new_token_ids = ids.gather(1, (places - begins).clamp(0, k)).int()
    text = texts.index_select(0, rows)
    text = new_token_ids.where((places >= begins) & (places < ends), text)
    texts.index_copy_(0, rows, text)
    lengths.index_copy_(0, rows, ends[:, 0])

    # Of each place with a token, how many tokens before it are those before the text's end.
    is_same = places < ends
    num_same = torch.zeros_like(text, dtype=torch.int64)
    for n in range(1, n_max + 1):
        before = text.gather(1, (places - n).clamp(min=0).expand_as(text))
        is_same = is_same & (places >= n) & (before == text.gather(1, (ends - n).clamp(min=0)))
        num_same += is_same
    best = (num_same * max_len + places).amax(dim=1, keepdim=True)
    found = best % max_len
    is_found = is_granted & (best[:, 0] // max_len >= n_min)
    following = text.gather(1, (found + columns % (ends - found).clamp(min=1)).clamp(max=max_len - 1)).long()
    drafts.copy_(following.where(is_found[:, None] & (columns < num_granted[:, None]), -1))
    counts.copy_(num_granted * is_found)
