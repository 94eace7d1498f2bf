"""`Sampler`: logits to one token per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend.sample.metadata import SamplingMetadata
from backend.sample.random import Purpose, uniform


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
            scaled = (logits[rows] - largest[rows, None]).double()
            scaled /= torch.tensor([metadata.params[row].temperature for row in rows], device=logits.device)[:, None]
            draws = uniform(
                [metadata.params[row].seed for row in rows], [metadata.positions[row] for row in rows], Purpose.TOKEN
            )
            for row, token_id in zip(rows, self._draw(scaled, rows, draws.tolist(), metadata), strict=True):
                chosen[row] = token_id
        return SamplerOutput(chosen, finite)

    def _draw(self, scaled: Tensor, rows: list[int], draws: list[float], metadata: SamplingMetadata) -> list[int]:
        vocab_size = scaled.shape[1]
        probs = scaled.softmax(dim=-1)
        token_ids = []
        for index, row in enumerate(rows):
            params = metadata.params[row]
            top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
            if top_k == vocab_size and params.top_p == 1:
                token_ids.append(_invert(probs[index], draws[index]))
            else:
                kept, order = _filter(probs[index], top_k, params.top_p)
                token_ids.append(int(order[_invert(kept, draws[index])]))
        return token_ids


def _filter(probs: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The kept probabilities in falling order and their ids; equal ones by rising id."""
    ordered, order = probs.sort(descending=True, stable=True)
    ordered = ordered[:top_k]
    cumulative = ordered.cumsum(0)
    # Keep a token while what precedes it has not reached top_p of the total: at least one always stays.
    before = cumulative - ordered
    kept = int((before < top_p * cumulative[-1]).sum())
    return ordered[: max(kept, 1)], order


def _invert(weights: Tensor, draw: float) -> int:
    """Index at which the cumulative weights pass `draw` (in [0, 1)) of their sum; never one of weight zero."""
    cumulative = weights.cumsum(0)
    target = cumulative.new_tensor(draw) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True))
    if index == len(weights):  # rounding at the very end: the last index that has any weight
        index = int(weights.nonzero()[-1])
    return index
