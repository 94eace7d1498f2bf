"""A whole batch's distributions after temperature, top-k and top-p, and draws from them.

The arithmetic is that of `kernels.reference.sample_tokens`, which goes row by row and asks the host on the way; here, on a GPU,
no value is asked for, so that it can run inside a CUDA graph. Weights are relative to a row's largest; a draw needs no more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.sample_tokens import GREEDY_TEMPERATURE

NUM_CANDIDATES = 1024  # among the largest logits of a row most filters end


def filtered_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, *, filters: bool) -> Tensor:
    """What each token weighs, 0 where it is filtered out; of a greedy row 1 for the largest logit alone, the lowest id of equals.

    Args:
        logits: float32 [num_rows, vocab_size]
        temperature: float32 [num_rows]; below 1e-5 the row is greedy
        top_k: int32 [num_rows]; below 1, or vocab_size and more: off
        top_p: float32 [num_rows], above 0; 1 and more: off
        filters: whether `top_k` or `top_p` is on in any row; what a host knows spares a sort.
    Returns:
        float32 [num_rows, vocab_size]; without meaning in a row with a NaN, or whose largest logit is infinite.
    """
    largest, best = logits.max(dim=-1, keepdim=True)
    is_greedy = (temperature < GREEDY_TEMPERATURE)[:, None]
    weights = ((logits - largest) / temperature[:, None].masked_fill(is_greedy, 1)).exp_()
    if filters:
        weights = _filter(logits, weights, top_k, top_p)
    choice = torch.arange(logits.shape[-1], device=logits.device) == best
    return choice.to(weights.dtype).where(is_greedy, weights)


def probabilities(weights: Tensor) -> Tensor:
    """float32, as `weights`, each row divided by its sum."""
    return weights / weights.sum(dim=-1, keepdim=True, dtype=torch.float64).float()


def draw_tokens(weights: Tensor, draws: Tensor) -> Tensor:
    """The first token, in order of id, whose cumulative weight exceeds `draw` of the sum; never one of weight zero.

    Args:
        weights: float32 [num_rows, vocab_size], none negative
        draws: float64 [num_rows], uniform in [0, 1)
    Returns:
        int64 [num_rows]; some id of the vocabulary for a row with NaN or without any weight.
    """
    vocab_size = weights.shape[-1]
    token_ids = torch.arange(vocab_size, device=weights.device)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    weighs = weights > 0
    is_past = weighs & (cumulative > draws[:, None] * cumulative[:, -1:])
    first = token_ids.where(is_past, vocab_size).amin(dim=-1)
    # Sums in another order, as a GPU's, may leave none past the draw at the very end.
    return first.minimum(token_ids.where(weighs, 0).amax(dim=-1))


def _filter(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the tokens, by falling logit and rising id, that top-k and then top-p reach."""
    vocab_size = logits.shape[-1]
    limits = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)[:, None]
    top_p = top_p[:, None].double()
    if logits.device.type == "cpu" and vocab_size > 2 * NUM_CANDIDATES:
        return _filter_candidates(logits, weights, limits, top_p)
    return _filter_sorted(logits, weights, limits, top_p)


def _filter_sorted(logits: Tensor, weights: Tensor, limits: Tensor, top_p: Tensor) -> Tensor:
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(-1, order)
    ordered = ordered.where(torch.arange(logits.shape[-1], device=logits.device) < limits, 0)
    kept = _keep(ordered, top_p, ordered.sum(dim=-1, keepdim=True, dtype=torch.float64))
    return torch.zeros_like(weights).scatter_(-1, order, ordered.where(kept, 0))


def _filter_candidates(logits: Tensor, weights: Tensor, limits: Tensor, top_p: Tensor) -> Tensor:
    """The same where asking for values costs nothing: only a row's largest logits are sorted if the filters end among them."""
    ids = logits.topk(NUM_CANDIDATES, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, places = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    order = ids.gather(-1, places)
    is_limited = limits <= NUM_CANDIDATES
    ordered = weights.gather(-1, order).where(torch.arange(NUM_CANDIDATES) < limits, 0)
    totals = (part.sum(dim=-1, keepdim=True, dtype=torch.float64) for part in (ordered, weights))
    kept = _keep(ordered, top_p, torch.where(is_limited, *totals)) & (torch.arange(NUM_CANDIDATES) < limits)
    # Of logits that equal the least candidate others may be no candidates, with lower ids.
    is_enough = values.where(kept, torch.inf).amin(dim=-1) > values[:, -1]
    is_off = limits == logits.shape[-1]
    is_enough &= (is_limited | is_off)[:, 0]
    is_off &= top_p >= 1
    filtered = torch.zeros_like(weights).scatter_(-1, order, ordered.where(kept, 0))
    filtered = weights.where(is_off, filtered)
    rest = (~is_enough & ~is_off[:, 0]).nonzero()[:, 0]
    if len(rest):
        filtered[rest] = _filter_sorted(logits[rest], weights[rest], limits[rest], top_p[rest])
    return filtered


def _keep(ordered: Tensor, top_p: Tensor, total: Tensor) -> Tensor:
    """Which of the weights, largest first, come before `top_p` of the total is reached; the first one always."""
    before = ordered.cumsum(dim=-1, dtype=torch.float64).sub_(ordered)
    return (before < top_p * total) | (top_p >= 1) | (torch.arange(ordered.shape[-1], device=ordered.device) == 0)
