"""`RoundDownload`: what became of a step's drafts, on its way to the host in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from backend.core.output import DraftRounds, FinishedOutput, ModelRunnerOutput, PendingOutput
from backend.sample.rejection_sampler import VerifiedRound
from backend.worker.stage_clock import StageClock


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """When a round was drafted and verified."""

    clock: StageClock  # of both stages
    preparation: StageClock | None = None  # of what the proposer computed at the end of the round before
    host_ms: float = 0.0  # of drafting, before the clock was started

    def read(self) -> tuple[float, float]:
        """Milliseconds of drafting and of verifying, once both have ended."""
        draft_ms, verify_ms = self.clock.stages_ms()
        if self.preparation is not None:
            draft_ms += sum(self.preparation.stages_ms())
        return draft_ms + self.host_ms, verify_ms


def pack_round(verified: VerifiedRound, draft_token_ids: Tensor) -> Tensor:
    """All that the host is told of a round: uint8 [num_round_bytes(num_rows, k)], of drafts int64 [num_rows, k].

    Laid out as the op `verify_chain` does it.
    """
    ends = torch.stack((verified.num_accepted, verified.finite.long()), dim=1)
    ids = torch.cat((verified.token_ids, ends, draft_token_ids), dim=1)
    probs = torch.stack((verified.target_probs, verified.accept_probs, verified.draft_probs))
    return torch.cat((ids.view(-1).view(torch.uint8), probs.view(-1).view(torch.uint8)))


def packed_ids(packed: Tensor, num_rows: int, k: int) -> Tensor:
    """The whole numbers of a packed round, in place: int64 [num_rows, 2 k + 3]."""
    return packed[: 8 * num_rows * (2 * k + 3)].view(torch.int64).view(num_rows, 2 * k + 3)


def num_round_bytes(num_rows: int, k: int) -> int:
    return num_rows * (8 * (k + 1 + 2 + k) + 4 * 3 * k)


class RoundDownload:
    """The `PendingOutput` of a step with drafts: what its other requests got, and the rounds; see `TokenDownload`."""

    def __init__(
        self,
        request_ids: list[str],
        num_draft_tokens: Sequence[int] | None,
        packed: Tensor,
        shape: tuple[int, int],
        buffer: Tensor,
        times: RoundTimes,
        not_finite: str,
        others: PendingOutput | None = None,
    ) -> None:
        """Args:
        request_ids: of the first rows of the round.
        num_draft_tokens: of each; of one without any, the round's token is a plain one. None: only the device knows, and
            there are no tokens below 0 among those that were drafted.
        packed: uint8 on the device, see `pack_round`. It may have padding rows behind those.
        shape: of the packed drafts, (num_rows, k).
        buffer: uint8 in host memory, of the same size.
        not_finite: what to say of a request without usable logits.
        others: of requests of the step that are not in the round.
        """
        self._request_ids = request_ids
        self._counts = num_draft_tokens
        self._times = times
        self._not_finite = not_finite
        self._others = others or FinishedOutput(ModelRunnerOutput({}))
        self._packed, self._shape = buffer, shape
        buffer.copy_(packed, non_blocking=True)
        times.clock.mark()

    def result(self) -> ModelRunnerOutput:
        output = self._others.result()
        self._times.clock.wait()
        ids, probs = self._unpack()
        k = probs.shape[2]
        num_accepted, last_token_ids = [], []
        for request_id, row in zip(self._request_ids, ids[:, : k + 3].tolist(), strict=True):
            accepted = row[k + 1]
            num_accepted.append(accepted)
            last_token_ids.append(row[accepted])
            if row[k + 2]:  # finite
                output.sampled_token_ids[request_id] = row[: accepted + 1]
            else:
                output.errors[request_id] = self._not_finite
        counts = self._counts
        if counts is None:
            counts = (ids[:, k + 3 :] >= 0).sum(axis=1).tolist()
        drafted = list(compress(range(len(counts)), counts))
        if not drafted:
            return output
        # `take` copies, and has to: the buffer has others in it behind this one.
        output.rounds = DraftRounds(
            request_ids=list(compress(self._request_ids, counts)),
            num_draft_tokens=list(compress(counts, counts)),
            num_accepted=list(compress(num_accepted, counts)),
            token_ids=list(compress(last_token_ids, counts)),
            draft_token_ids=ids[:, k + 3 :].take(drafted, axis=0),
            probs=probs.take(drafted, axis=1),
            draft_ms=0.0,
            verify_ms=0.0,
            clock=self._times.read,
        )
        return output

    def _unpack(self) -> tuple[np.ndarray, np.ndarray]:
        """Views of the buffer: int64 [num_reqs, 2 k + 3], float32 [3, num_reqs, k]."""
        num_rows, k = self._shape
        num_reqs, packed = len(self._request_ids), self._packed.numpy()
        num_bytes = 8 * num_rows * (2 * k + 3)
        ids = packed[:num_bytes].view(np.int64).reshape(num_rows, 2 * k + 3)
        probs = packed[num_bytes:].view(np.float32).reshape(3, num_rows, k)
        return ids[:num_reqs], probs[:, :num_reqs]
