"""Drafts that mean nothing and are accepted at a set rate: for the times of rounds on models whose tokens mean nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from backend.sample.random import Purpose, uniform
from backend.sample.rejection_sampler import RejectionSampler, VerifiedRound, count_accepted, round_tokens
from backend.sample.sampler import SamplerOps
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.spec_decode.proposer import DraftOutput, DraftRequest


class SyntheticProposer:
    """Drafts as many tokens as are allowed, at no cost but that of drawing what becomes of each.

    An even id is to be accepted and an odd one is not, which tells `SyntheticSampler` without the host. The draws are functions
    of seed and output position, so that each position that a round comes to is a trial of its own with the same chance.

    Args:
        acceptance: chance of each token to be accepted once those before it are, 0 to 1.
        vocab_size: of the target, at least 2.
    """

    def __init__(self, acceptance: float, vocab_size: int) -> None:
        self._acceptance = acceptance
        self._num_pairs = vocab_size // 2

    def begin(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """What a request holds does not matter, here and below."""

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def follow(self, spans: Mapping[str, tuple[int, int]]) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> DraftOutput:
        counts = [request.max_tokens for request in requests]
        k = max(counts)
        positions = np.array([request.position for request in requests])[:, None] + np.arange(k)
        seeds = np.repeat(np.array([request.sampling_params.seed for request in requests], dtype=np.uint64), k)
        draws = uniform(seeds.tolist(), positions.ravel().tolist(), Purpose.ACCEPT).reshape(positions.shape)
        # Ids that differ from place to place, as those of a text do: a card's clock depends on what it multiplies.
        token_ids = 2 * (positions % self._num_pairs) + (draws >= self._acceptance)
        return DraftOutput(torch.from_numpy(token_ids.astype(np.int64)), counts)


class SyntheticSampler(RejectionSampler):
    """Verifies as `RejectionSampler`, and then accepts what the drafts of `SyntheticProposer` say.

    Behind them comes the token that the real verification ended with, whatever it is worth there. The target's probabilities
    are real; the chance of acceptance is the one that was set.
    """

    def __init__(self, acceptance: float, ops: SamplerOps | None = None) -> None:
        super().__init__(ops)
        self._acceptance = acceptance

    def __call__(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        sampling: SpeculativeSampling | None,
    ) -> VerifiedRound:
        verified = super().__call__(target_logits, draft_token_ids, num_draft_tokens, draft_probs, sampling)
        columns = torch.arange(target_logits.shape[1], device=target_logits.device)
        is_drafted = columns[:-1] < num_draft_tokens[:, None]
        num_accepted = count_accepted((draft_token_ids % 2 == 0) & is_drafted)
        last = verified.token_ids.gather(1, verified.num_accepted[:, None])[:, 0]
        return replace(
            verified,
            token_ids=round_tokens(draft_token_ids, num_accepted, last, columns),
            num_accepted=num_accepted,
            accept_probs=is_drafted * torch.full_like(verified.accept_probs, self._acceptance),
        )
