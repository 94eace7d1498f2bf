"""`Speculation`: drafting and verification in a step, around the target's forward pass."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from backend.core.output import ModelRunnerOutput, PendingOutput, SchedulerOutput
from backend.sample.metadata import copy_to
from backend.sample.rejection_sampler import RejectionSampler, VerifiedRound
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.spec_decode.proposer import DraftOutput, DraftRequest, Proposer
from backend.worker.round_download import RoundTimes
from backend.worker.speculative_batch import Verification
from backend.worker.stage_clock import StageClock


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be verified in a step: the requests for which anything was drafted."""

    num_tokens: dict[str, int]  # at least 1 each
    output: DraftOutput  # of those
    times: RoundTimes


@dataclass(frozen=True, slots=True)
class Followers:
    """What came of a round, by the places of each row: its last token, then its drafts."""

    last_places: Tensor  # int64 [num_rows], of the last token that is not left out
    token_ids: Tensor  # int64 [num_rows, k + 1], what comes behind each; behind those left out any, or -1


class Speculation:
    """Args:
    proposer: of the drafts.
    sampler: decides what is accepted.
    """

    def __init__(self, proposer: Proposer, sampler: RejectionSampler, device: torch.device) -> None:
        self._proposer = proposer
        self._sampler = sampler
        self._device = device
        self._preparation: StageClock | None = None
        self._known: set[str] = set()  # requests that the proposer knows

    def update(self, scheduled: SchedulerOutput) -> None:
        """Tell the proposer who comes and goes."""
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            self._proposer.forget(request_id)
            self._known.discard(request_id)
        for new in scheduled.new_requests:
            self._proposer.begin(new.request_id, new.token_ids, new.num_computed_tokens)
            self._known.add(new.request_id)

    def follow(self, scheduled: SchedulerOutput) -> None:
        """Tell the proposer of prompts that are about to be computed, also again after a preemption."""
        rows = zip(
            scheduled.kinds.items(), scheduled.num_scheduled_tokens.values(), scheduled.num_computed_tokens, strict=True
        )
        spans = {
            request_id: (num_computed, num_computed + num_tokens)
            for (request_id, kind), num_tokens, num_computed in rows
            if kind != "decode"
        }
        if spans:
            self._proposer.follow(spans)

    def propose(self, requests: Sequence[DraftRequest]) -> tuple[DraftOutput, float]:
        """Drafts that the host makes here and now, and how long that took, in milliseconds."""
        begin = time.perf_counter()
        output = self._proposer.propose(requests)
        return output, (time.perf_counter() - begin) * 1e3

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """What runs within belongs to the drafts of the next round."""
        clock = StageClock(self._device)
        yield
        clock.mark()
        self._preparation = clock

    def begin_round(self, host_ms: float = 0.0) -> RoundTimes:
        """Its draft begins now, on the device.

        Args:
            host_ms: how long the host has drafted before.
        """
        times = RoundTimes(StageClock(self._device), self._preparation, host_ms)
        self._preparation = None
        return times

    def draft(self, requests: Sequence[DraftRequest]) -> Draft | None:
        """Draft for these requests; None where nothing comes of it."""
        preparation = self._preparation
        times = self.begin_round()
        output = self._proposer.propose(requests)
        if output.token_ids.device.type != self._device.type:  # the host has drafted
            output = replace(output, token_ids=copy_to(output.token_ids.numpy(), self._device))
        drafted = [index for index, count in enumerate(output.num_tokens) if count]
        if not drafted:
            self._preparation = preparation
            return None
        if len(drafted) < len(requests):
            places = copy_to(np.array(drafted, dtype=np.int64), self._device)
            output = replace(
                output,
                token_ids=output.token_ids[places],
                num_tokens=[output.num_tokens[index] for index in drafted],
                probs=None if output.probs is None else output.probs[places],
            )
        times.clock.mark()
        num_tokens = {requests[index].request_id: output.num_tokens[place] for place, index in enumerate(drafted)}
        return Draft(num_tokens, output, times)

    def put_drafts(self, token_ids: Tensor, draft: Draft, verification: Verification) -> None:
        """Fill the places of the drafts among a step's tokens, int64 [num_tokens]."""
        drafts, counts = draft.output.token_ids, verification.num_draft_tokens
        k = drafts.shape[1]
        places = np.flatnonzero(np.arange(k) < counts[:, None])
        indices = copy_to(np.stack((verification.draft_indices, places)), self._device)
        token_ids.index_copy_(0, indices[0], drafts.reshape(-1)[indices[1]])

    def verify(self, logits: Tensor, draft: Draft, verification: Verification) -> VerifiedRound:
        """What becomes of a draft.

        Args:
            logits: float32 [num_logits, vocab_size], of `verification.logits_indices`.
        """
        k, sampling = draft.output.token_ids.shape[1], verification.sampling
        return self._sampler(
            padded_logits(logits, verification.num_draft_tokens, k),
            draft.output.token_ids,
            copy_to(verification.num_draft_tokens, self._device),
            draft.output.probs,
            SpeculativeSampling.build(sampling, k, self._device) if sampling else None,
        )

    def watch(self, pending: PendingOutput) -> PendingOutput:
        """The same result, of which the proposer is told."""
        return _Watched(pending, self._proposer, self._known)


def padded_logits(logits: Tensor, num_draft_tokens: np.ndarray, k: int) -> Tensor:
    """float32 [num_rows, k + 1, vocab_size], zeros behind a row's last draft, of those of each row's tokens, end to end."""
    num_rows = len(num_draft_tokens)
    if (num_draft_tokens == k).all():
        return logits.view(num_rows, k + 1, -1)
    places = copy_to(np.flatnonzero(np.arange(k + 1) <= num_draft_tokens[:, None]), logits.device)
    padded = logits.new_zeros(num_rows * (k + 1), logits.shape[1])
    return padded.index_copy_(0, places, logits).view(num_rows, k + 1, -1)


@dataclass(slots=True)
class _Watched:
    pending: PendingOutput
    proposer: Proposer
    known: set[str]

    def result(self) -> ModelRunnerOutput:
        output = self.pending.result()
        for request_id, token_ids in output.sampled_token_ids.items():
            if request_id in self.known:  # and has not ended while its last step was under way
                self.proposer.extend(request_id, token_ids)
        return output
