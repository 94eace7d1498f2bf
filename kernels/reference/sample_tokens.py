"""One token per row by temperature, top-k and top-p, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this a temperature is greedy: the scaled logits could not be told from a one-hot, and would only overflow.
GREEDY_TEMPERATURE = 1e-5
# Of a row's histogram; so few tokens are sorted.
_NUM_BINS = 2048


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, draws: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw each row's token from its filtered distribution; greedy rows take the largest logit, the lowest id among equals.

    A token weighs `exp((logit - largest) / temperature)`, in fp32: relative to the row's largest no exponential overflows.
    Top-k keeps the k largest logits, of equal ones the lowest ids. Top-p, on what top-k left, goes through the tokens in
    that same order and keeps one while the weights before it have not reached `top_p` of their sum, so at least one. The
    draw inverts the cumulative distribution of the tokens kept, in order of id, with sums in float64: the first token
    whose cumulative weight exceeds `draw` of the sum, never one of weight zero. A row depends on its own values alone.

    Args:
        logits: float32 [num_rows, vocab_size]
        temperature: float32 [num_rows]; below 1e-5 the row is greedy
        top_k: int32 [num_rows]; below 1, or vocab_size and more: off
        top_p: float32 [num_rows], above 0; 1 and more: off
        draws: float64 [num_rows], uniform in [0, 1)
    Returns:
        token_ids int64 [num_rows], and finite bool [num_rows]: False where a logit is NaN or the largest is infinite, and
        then the token is some id of the vocabulary. Nothing is mutated.
    """
    largest, token_ids = logits.max(dim=-1)
    finite = largest.isfinite()
    rows = ((temperature >= GREEDY_TEMPERATURE) & finite).nonzero()[:, 0].tolist()
    for row in rows:
        weights = ((logits[row] - largest[row]) / temperature[row]).exp_()
        kept = _filter(logits[row], weights, int(top_k[row]), float(top_p[row]))
        token_ids[row] = _invert(kept, float(draws[row]))
    return token_ids, finite


def _filter(logits: Tensor, weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """`weights` of one row, zero where a token is filtered out."""
    if 0 < top_k < len(logits):
        # What weighs nothing is never drawn, and need not be counted.
        weights = _keep_until(logits, weights, weights > 0, top_k)
    if top_p < 1:
        weights = _keep_until(logits, weights, weights, top_p * float(weights.sum(dtype=torch.float64)))
    return weights


def _keep_until(logits: Tensor, weights: Tensor, amounts: Tensor, target: float) -> Tensor:
    """`weights` of the tokens, by falling logit and rising id, before which the sum of `amounts` is below `target`.

    No sort: a histogram over the range of the logits says in which bin the target is reached, and only that bin is gone
    into, by another histogram while it is large.
    """
    ids = torch.arange(len(logits), device=logits.device)
    values, amounts, above = logits, amounts.double(), 0.0
    while True:
        high = values.max().double()
        low = values.where(amounts > 0, high).min().double()
        if len(values) <= _NUM_BINS or low == high:
            break
        bins = values.double().neg_().add_(high).mul_((_NUM_BINS - 1) / (high - low)).clamp_(max=_NUM_BINS - 1).int()
        reached = torch.bincount(bins, weights=amounts, minlength=_NUM_BINS).cumsum(0).add_(above)
        target = min(target, float(reached[-1]))  # which rounding may have left just below it
        found = int(torch.searchsorted(reached, target))
        above = float(reached[found - 1]) if found else above
        inside = (bins == found).nonzero()[:, 0]
        ids, values, amounts = ids[inside], values[inside], amounts[inside]
    # Equal ones are in order already, once what does not count is gone.
    order = values.argsort(descending=True, stable=True) if low < high else amounts.nonzero()[:, 0]
    ids, values, amounts = ids[order], values[order], amounts[order]
    before = amounts.cumsum(0).sub_(amounts).add_(above)
    num_kept = max(1, int((before < target).sum()))
    threshold = values[num_kept - 1]
    kept = weights * (logits >= threshold)
    kept[ids[num_kept:][values[num_kept:] == threshold]] = 0
    return kept


def _invert(weights: Tensor, draw: float) -> int:
    """Index at which the cumulative weights pass `draw` (in [0, 1)) of their sum; never one of weight zero."""
    cumulative = weights.cumsum(0, dtype=torch.float64)
    index = int(torch.searchsorted(cumulative, draw * cumulative[-1], right=True))
    if index == len(weights):  # rounding at the very end: the last index that has any weight
        index = int(weights.nonzero()[-1])
    return index
