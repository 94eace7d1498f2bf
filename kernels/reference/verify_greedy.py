"""What becomes of greedy drafts, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def verify_greedy(logits: Tensor, draft_token_ids: Tensor, num_draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Accept each row's drafts as far as they are the target's likeliest tokens, and add the one behind them.

    A drafted token is accepted where it is the lowest id that has the largest logit of its position, all before it are, and
    that logit is finite. The last token is the likeliest behind those accepted.

    Args:
        logits: float32 [num_rows * (k + 1), vocab_size], k at least 1
        draft_token_ids: int64 [num_rows, k], below vocab_size
        num_draft_tokens: int64 [num_rows], 0 to k; positions from there on are padding, whatever they hold
    Returns:
        packed: uint8 [num_rows * (28 * k + 24)]: `ids`, and behind them float32 [3, num_rows, k]: of each drafted token its
            probability at temperature 1, whether it is its position's likeliest (1 or 0), and 1; of padding 0.
        ids: int64 [num_rows, 2 * k + 3], a view. In each row k + 1 columns with the accepted tokens, the last one and -1
            behind it; how many were accepted; 1, or 0 where a position that was needed has a NaN or no finite maximum, and
            then the last token is some id of the vocabulary; and `draft_token_ids`.
        Nothing is mutated.
    """
    num_rows, k = draft_token_ids.shape
    # NaN counts as the largest, so the maximum tells all.
    largest, best = logits.max(dim=-1)
    best, is_finite = best.view(num_rows, k + 1), largest.isfinite().view(num_rows, k + 1)
    columns = torch.arange(k + 1, device=logits.device)
    is_drafted = columns[:k] < num_draft_tokens[:, None]
    drafted = draft_token_ids.where(is_drafted, 0)
    scores = logits.view(num_rows, k + 1, logits.shape[1])[:, :k]
    log_probs = scores.gather(-1, drafted[:, :, None])[:, :, 0] - scores.logsumexp(dim=-1)
    is_accepted = is_drafted & (drafted == best[:, :k])
    num_accepted = (is_accepted & is_finite[:, :k]).long().cumprod(dim=-1).sum(dim=-1, keepdim=True)
    is_usable = (is_finite | (columns > num_accepted)).all(dim=-1, keepdim=True)
    # What is accepted is the likeliest, and so is what comes behind it.
    token_ids = best.where(columns <= num_accepted, -1)
    ids = torch.cat((token_ids, num_accepted, is_usable.long(), draft_token_ids), dim=1)
    probs = torch.stack((log_probs.exp().where(is_drafted, 0), is_accepted.float(), is_drafted.float()))
    packed = torch.cat((ids.view(-1).view(torch.uint8), probs.view(-1).view(torch.uint8)))
    return packed, packed[: ids.nbytes].view(torch.int64).view(ids.shape)
