"""`DraftSampling`: draws of a batch's drafts, each from the draft's own distribution after its request's filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.sample.columns import SamplingColumns
from backend.sample.filtering import draw_tokens, filtered_weights, probabilities
from backend.sample.metadata import copy_to
from backend.sample.random import Purpose, uniform
from backend.spec_decode.proposer import DraftRequest


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How the requests of a draft are sampled, on its device."""

    temperature: Tensor  # float32 [num_reqs]
    top_k: Tensor  # int32 [num_reqs]
    top_p: Tensor  # float32 [num_reqs]
    draws: Tensor  # float64 [num_reqs, k]
    filters: bool

    @staticmethod
    def of(requests: Sequence[DraftRequest], k: int, device: torch.device) -> DraftSampling | None:
        """None where all are greedy."""
        columns = SamplingColumns.of(request.sampling_params for request in requests)
        if columns.is_greedy.all():
            return None
        seeds = np.repeat(columns.seeds, k).tolist()
        positions = [request.position + index for request in requests for index in range(k)]
        return DraftSampling(
            temperature=copy_to(columns.temperature, device),
            top_k=copy_to(columns.top_k, device),
            top_p=copy_to(columns.top_p, device),
            draws=copy_to(uniform(seeds, positions, Purpose.DRAFT).reshape(len(requests), k), device),
            filters=columns.filters,
        )

    def draw(self, logits: Tensor, rows: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """The token at a place of the draft, int64 [num_rows], and what it was drawn from, float32 [num_rows, vocab_size].

        Args:
            logits: float32 [num_rows, vocab_size], the draft's own.
            rows: int64 [num_rows], the requests that these are.
        """
        filters = (self.temperature[rows], self.top_k[rows], self.top_p[rows])
        logits = logits.nan_to_num(nan=0.0, neginf=-torch.inf)  # a draft may be broken, and what it was drawn from not
        weights = filtered_weights(logits, *filters, filters=self.filters)
        return draw_tokens(weights, self.draws[rows, index]), probabilities(weights)
