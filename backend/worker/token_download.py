"""`TokenDownload`: a step's sampled tokens on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from backend.core.output import ModelRunnerOutput
from backend.worker.step_tensors import HostBuffers


class TokenDownload:
    """The `PendingOutput` of a step on CUDA: starts the copy when made, waits for it in `result`."""

    def __init__(self, request_ids: list[str], outcomes: Tensor, buffers: HostBuffers, not_finite: str) -> None:
        """Args:
        request_ids: of the sampled requests.
        outcomes: int64 [num_sampled], a token, or -1: the request had no usable logits.
        not_finite: what to say then.
        """
        self._request_ids = request_ids
        self._not_finite = not_finite
        self._outcomes = buffers.next(8 * len(request_ids)).view(torch.int64)
        self._outcomes.copy_(outcomes, non_blocking=True)
        self._done = torch.cuda.Event() if outcomes.device.type == "cuda" else None
        if self._done:
            self._done.record()

    def result(self) -> ModelRunnerOutput:
        if self._done:
            self._done.synchronize()
        outcomes = self._outcomes.tolist()
        sampled = dict(zip(self._request_ids, [[outcome] for outcome in outcomes], strict=True))
        if not outcomes or min(outcomes) >= 0:  # nearly always
            return ModelRunnerOutput(sampled)
        failed = [request_id for request_id, (outcome,) in sampled.items() if outcome < 0]
        for request_id in failed:
            del sampled[request_id]
        return ModelRunnerOutput(sampled, dict.fromkeys(failed, self._not_finite))
