"""`Sampler`: logits to one token per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.sample.metadata import SamplingMetadata
from backend.sample.random import Purpose, uniform

_NUCLEUS_GUESS = 512


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    token_ids: list[int]
    finite: list[bool]  # False: the row had no usable logits and its token means nothing


class Sampler:
    """Greedy rows take the largest logit, the lowest id among equals. Others draw from the filtered distribution.

    Filtering is temperature, then top-k, then top-p on what top-k left (the order of transformers and vLLM). The draw inverts
    the cumulative distribution at one counter-based uniform, in an order that depends on the row's own parameters only:
    by id without a filter, by falling probability with one. So a row's token does not depend on its batch.
    """

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Args:
        logits: fp32 [num_rows, vocab_size]; rows with banned tokens are overwritten there.
        """
        for row, banned in enumerate(metadata.banned_token_ids):
            if banned:
                logits[row, list(banned)] = -torch.inf
        largest, token_ids = logits.max(dim=-1)
        # The maximum is NaN if any logit is, and infinite if any is +inf or nothing is left to choose from.
        finite = largest.isfinite().tolist()
        rows = [row for row in metadata.sampled_rows if finite[row]]
        chosen = token_ids.tolist()
        if rows:
            temperatures = torch.tensor([metadata.params[row].temperature for row in rows], device=logits.device)
            # Relative to the row's maximum: no exponential overflows, and the largest weight is 1.
            weights = ((logits[rows] - largest[rows, None]) / temperatures[:, None]).exp_()
            draws = uniform(
                [metadata.params[row].seed for row in rows], [metadata.positions[row] for row in rows], Purpose.TOKEN
            )
            for row, token_id in zip(rows, _draw(weights, rows, draws.tolist(), metadata), strict=True):
                chosen[row] = token_id
        return SamplerOutput(chosen, finite)


def _draw(weights: Tensor, rows: list[int], draws: list[float], metadata: SamplingMetadata) -> list[int]:
    """One token id per row of unnormalised probabilities, float32 [len(rows), vocab_size]."""
    vocab_size = weights.shape[1]
    token_ids = []
    for index, row in enumerate(rows):
        params = metadata.params[row]
        top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        if top_k == vocab_size and params.top_p == 1:
            token_ids.append(_invert(weights[index], draws[index]))
        else:
            kept, ids = _filter(weights[index], top_k, params.top_p)
            token_ids.append(int(ids[_invert(kept, draws[index])]))
    return token_ids


def _filter(weights: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The weights kept, in falling order, and their ids; equal ones by rising id."""
    vocab_size = len(weights)
    by_count = top_k < vocab_size
    # The nucleus is nearly always small: widen the search only until it is inside.
    size = top_k if by_count else _NUCLEUS_GUESS
    while True:
        ids = _largest(weights, size)
        ordered = weights[ids]
        cumulative = ordered.cumsum(0, dtype=torch.float64)
        total = cumulative[-1] if by_count else weights.sum(dtype=torch.float64)
        if by_count or size >= vocab_size or cumulative[-1] >= top_p * total:
            break
        size *= 16
    # Keep a token while what precedes it has not reached top_p of the total: at least one always stays.
    kept = max(1, int((cumulative - ordered < top_p * total).sum()))
    return ordered[:kept], ids


def _largest(weights: Tensor, size: int) -> Tensor:
    """Ids of the `size` largest weights in falling order, equal ones by rising id, without sorting the rest."""
    if size >= len(weights):
        return weights.sort(descending=True, stable=True).indices
    candidates = (weights >= weights.topk(size).values[-1]).nonzero()[:, 0]
    return candidates[weights[candidates].sort(descending=True, stable=True).indices][:size]


def _invert(weights: Tensor, draw: float) -> int:
    """Index at which the cumulative weights pass `draw` (in [0, 1)) of their sum; never one of weight zero."""
    cumulative = weights.cumsum(0, dtype=torch.float64)
    target = draw * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True))
    if index == len(weights):  # rounding at the very end: the last index that has any weight
        index = int(weights.nonzero()[-1])
    return index
