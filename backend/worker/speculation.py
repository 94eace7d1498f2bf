"""`Speculation`: drafting and verification in a step, around the target's forward pass."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from backend.core.output import DraftRounds, ModelRunnerOutput, PendingOutput, SchedulerOutput
from backend.sample.metadata import copy_to
from backend.sample.rejection_sampler import RejectionSampler, VerifiedRound
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.spec_decode.proposer import DraftOutput, DraftRequest, Proposer
from backend.worker.speculative_batch import Verification


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be verified in a step: the requests for which anything was drafted."""

    num_tokens: dict[str, int]  # at least 1 each
    output: DraftOutput  # of those
    clock: StageClock
    preparation: StageClock | None = None  # of what the proposer computed at the end of the round before


class StageClock:
    """When the stages of a step began, on the device's own clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []
        self.mark()

    def mark(self) -> None:
        """A stage ends here, and the next one begins."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def stages_ms(self) -> list[float]:
        """How long each took. On CUDA the last mark must have been reached."""
        times = self._marks
        if self._on_cuda:
            return [begin.elapsed_time(end) for begin, end in pairwise(times)]  # type: ignore[union-attr]
        return [(end - begin) * 1e3 for begin, end in pairwise(times)]  # type: ignore[operator]


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

    def update(self, scheduled: SchedulerOutput) -> None:
        """Tell the proposer who comes and goes."""
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            self._proposer.forget(request_id)
        for new in scheduled.new_requests:
            self._proposer.begin(new.request_id, new.token_ids, new.num_computed_tokens)

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

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """What runs within belongs to the drafts of the next round."""
        clock = StageClock(self._device)
        yield
        clock.mark()
        self._preparation = clock

    def draft(self, requests: Sequence[DraftRequest]) -> Draft | None:
        """Draft for these requests; None where nothing comes of it."""
        clock = StageClock(self._device)
        output = self._proposer.propose(requests)
        drafted = [index for index, count in enumerate(output.num_tokens) if count]
        if not drafted:
            return None
        if len(drafted) < len(requests):
            places = copy_to(np.array(drafted, dtype=np.int64), self._device)
            output = replace(
                output,
                token_ids=output.token_ids[places],
                num_tokens=[output.num_tokens[index] for index in drafted],
                probs=None if output.probs is None else output.probs[places],
            )
        clock.mark()
        num_tokens = {requests[index].request_id: output.num_tokens[place] for place, index in enumerate(drafted)}
        preparation, self._preparation = self._preparation, None
        return Draft(num_tokens, output, clock, preparation)

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
        num_rows, k = draft.output.token_ids.shape
        counts = verification.num_draft_tokens
        if (counts == k).all():
            target_logits = logits.view(num_rows, k + 1, -1)
        else:
            places = copy_to(np.flatnonzero(np.arange(k + 1) <= counts[:, None]), self._device)
            target_logits = logits.new_zeros(num_rows * (k + 1), logits.shape[1])
            target_logits = target_logits.index_copy_(0, places, logits).view(num_rows, k + 1, -1)
        sampling = verification.sampling
        return self._sampler(
            target_logits,
            draft.output.token_ids,
            copy_to(counts, self._device),
            draft.output.probs,
            SpeculativeSampling.build(sampling, k, self._device) if sampling else None,
        )

    def watch(self, pending: PendingOutput) -> PendingOutput:
        """The same result, of which the proposer is told."""
        return _Watched(pending, self._proposer)


@dataclass(slots=True)
class _Watched:
    pending: PendingOutput
    proposer: Proposer

    def result(self) -> ModelRunnerOutput:
        output = self.pending.result()
        for request_id, token_ids in output.sampled_token_ids.items():
            self.proposer.extend(request_id, token_ids)
        return output


class RoundDownload:
    """The `PendingOutput` of a step with drafts: what its other requests got, and the rounds; see `TokenDownload`."""

    def __init__(
        self, others: PendingOutput, draft: Draft, verified: VerifiedRound, buffer: Tensor, not_finite: str
    ) -> None:
        """Args:
        others: of the step's other requests.
        buffer: uint8 in host memory, of `num_bytes(draft)`.
        not_finite: what to say of a request without usable logits.
        """
        self._others = others
        self._draft = draft
        self._not_finite = not_finite
        drafted = draft.output.token_ids
        ends = torch.stack((verified.num_accepted, verified.finite.long()), dim=1)
        ids = torch.cat((verified.token_ids, ends, drafted), dim=1)
        probs = torch.stack((verified.target_probs, verified.accept_probs, verified.draft_probs))
        host_ids = buffer[: ids.nbytes].view(torch.int64).view(ids.shape)
        host_probs = buffer[ids.nbytes :].view(torch.float32).view(probs.shape)
        host_ids.copy_(ids, non_blocking=True)
        host_probs.copy_(probs, non_blocking=True)
        self._ids, self._probs = host_ids.numpy(), host_probs.numpy()
        draft.clock.mark()
        self._done = torch.cuda.Event() if ids.device.type == "cuda" else None
        if self._done:
            self._done.record()

    @staticmethod
    def num_bytes(draft: Draft) -> int:
        num_rows, k = draft.output.token_ids.shape
        return num_rows * (8 * (k + 1 + 2 + k) + 4 * 3 * k)

    def result(self) -> ModelRunnerOutput:
        output = self._others.result()
        if self._done:
            self._done.synchronize()
        k = self._probs.shape[2]
        num_accepted, finite = self._ids[:, k + 1].tolist(), self._ids[:, k + 2].tolist()
        request_ids, token_ids = list(self._draft.num_tokens), []
        for request_id, ids, accepted, is_finite in zip(
            request_ids, self._ids[:, : k + 1].tolist(), num_accepted, finite, strict=True
        ):
            token_ids.append(ids[accepted])
            if is_finite:
                output.sampled_token_ids[request_id] = ids[: accepted + 1]
            else:
                output.errors[request_id] = self._not_finite
        draft_ms, verify_ms = self._draft.clock.stages_ms()
        if self._draft.preparation is not None:
            draft_ms += sum(self._draft.preparation.stages_ms())
        output.rounds = DraftRounds(
            request_ids=request_ids,
            num_draft_tokens=list(self._draft.num_tokens.values()),
            num_accepted=num_accepted,
            token_ids=token_ids,
            draft_token_ids=self._ids[:, k + 3 :].copy(),
            probs=self._probs.copy(),
            draft_ms=draft_ms,
            verify_ms=verify_ms,
        )
        return output
