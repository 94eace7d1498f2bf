"""Rounds of the rejection sampler for its tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backend.sample.metadata import SamplingMetadata
from backend.sample.rejection_sampler import RejectionSampler, VerifiedRound
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.sampling_params import SamplingParams

CPU = torch.device("cpu")


def build(
    rows: list[dict[str, Any]], k: int, positions: list[int] | None = None, banned: list[tuple[int, ...]] | None = None
) -> SpeculativeSampling:
    params = [SamplingParams(**row) for row in rows]
    metadata = SamplingMetadata(params, positions or [0] * len(rows), banned or [()] * len(rows))
    sampling = SpeculativeSampling.build(metadata, k, CPU)
    assert sampling is not None
    return sampling


def verify(
    logits: Tensor,
    draft: list[list[int]],
    sampling: SpeculativeSampling | None,
    draft_probs: Tensor | None = None,
    num_draft_tokens: list[int] | None = None,
) -> VerifiedRound:
    counts = num_draft_tokens or [len(row) for row in draft]
    return RejectionSampler()(logits, torch.tensor(draft), torch.tensor(counts), draft_probs, sampling)
