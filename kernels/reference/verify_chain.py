"""What becomes of chains of drafts, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.sample_nodes import SampledNodes


def verify_chain(
    logits: Tensor, draft_token_ids: Tensor, num_draft_tokens: Tensor, sampled: SampledNodes | None = None
) -> tuple[Tensor, Tensor]:
    """Accept each row's drafts as far as they are the target's own tokens, and add the one behind them.

    The target's token of a position is the lowest id that has its largest logit, which has to be finite; or of a sampled row
    what `sample_nodes` has drawn. A draft is accepted if it is that token and all before it are accepted. The last token is
    the target's behind those.

    Args:
        logits: float32 [num_rows * (k + 1), vocab_size], k at least 1
        draft_token_ids: int64 [num_rows, k], below vocab_size
        num_draft_tokens: int64 [num_rows], 0 to k; positions from there on are padding, whatever they hold
        sampled: of `sample_nodes` over these chains; None: all rows are greedy
    Returns:
        packed: uint8 [num_rows * (28 * k + 24)]: `ids`, and behind them float32 [3, num_rows, k]: of each drafted token its
            probability, of a greedy row at temperature 1, with which it is accepted once it is reached, of a greedy row 1 or
            0, and 1; of padding 0.
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
    target_probs = log_probs.exp()
    if sampled is not None:
        is_sampled = sampled.token_ids >= 0
        best = sampled.token_ids.where(is_sampled, best)
        target_probs = sampled.probs.where(is_sampled[:, :k], target_probs)
    is_accepted = is_drafted & (drafted == best[:, :k])
    accept_probs = is_accepted.float()
    if sampled is not None:
        accept_probs = sampled.probs.where(is_sampled[:, :k], accept_probs)
    num_accepted = (is_accepted & is_finite[:, :k]).long().cumprod(dim=-1).sum(dim=-1, keepdim=True)
    is_usable = (is_finite | (columns > num_accepted)).all(dim=-1, keepdim=True)
    # What is accepted is the target's own, and so is what comes behind it.
    token_ids = best.where(columns <= num_accepted, -1)
    ids = torch.cat((token_ids, num_accepted, is_usable.long(), draft_token_ids), dim=1)
    probs = torch.stack((*(it.where(is_drafted, 0) for it in (target_probs, accept_probs)), is_drafted.float()))
    packed = torch.cat((ids.view(-1).view(torch.uint8), probs.view(-1).view(torch.uint8)))
    return packed, packed[: ids.nbytes].view(torch.int64).view(ids.shape)
