"""`GraphRounds`: speculative rounds by way of `RoundGraphs`, from the scheduler's word to the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from backend.core.output import PendingOutput, SchedulerOutput
from backend.spec_decode.proposer import DraftRequest
from backend.worker.round_download import RoundDownload, RoundTimes, num_round_bytes
from backend.worker.round_graphs import RoundGraphs, RoundParts
from backend.worker.speculation import Speculation
from backend.worker.speculative_batch import RoundInput, SpeculativeInputBatch
from backend.worker.step_tensors import HostBuffers


class GraphsOfRounds(Protocol):
    """`RoundGraphs`, which says what each is, or `TreeGraphs`."""

    longest: int

    def fits(self, num_reqs: int) -> bool: ...

    def num_slots_to_draft(self, num_tokens: int, count: int) -> int: ...

    def start(self, step: RoundInput, buffers: HostBuffers, drafts: np.ndarray | None = None) -> int: ...

    def draft(self) -> None: ...

    def verify(self) -> tuple[Tensor, tuple[int, int]]: ...

    def go_on(self) -> None: ...


class GraphRounds:
    """Takes steps in which all requests decode, without banned ids, and no more than there are graphs for.

    Args:
        not_finite: what to say of a request without usable logits.
    """

    def __init__(
        self,
        graphs: GraphsOfRounds,
        parts: RoundParts,
        speculation: Speculation,
        batch: SpeculativeInputBatch,
        uploads: HostBuffers,
        downloads: HostBuffers,
        not_finite: str,
    ) -> None:
        self._graphs = graphs
        self._chain, self._head, self._texts = parts.chain, parts.head, parts.texts
        self._speculation = speculation
        self._batch = batch
        self._uploads, self._downloads = uploads, downloads
        self._not_finite = not_finite
        # What the last round has drafted for the next one: the slots of its requests, and how many tokens each.
        self._ahead: dict[str, int] = {}
        self._num_ahead = 0
        self._last: RoundInput | None = None  # if it goes on by itself
        self._is_plain = False  # that the last step, which might have had drafts, had none

    def takes(self, scheduled: SchedulerOutput) -> bool:
        """Whether a step can be such a round. To be asked when the batch knows of the step."""
        if not scheduled.num_draft_tokens or not self._graphs.fits(len(scheduled.num_scheduled_tokens)):
            return False
        is_decode = set(scheduled.kinds.values()) == {"decode"}
        return (
            is_decode
            and scheduled.total_num_scheduled_tokens == len(scheduled.num_scheduled_tokens)
            and self._batch.is_free_round(scheduled)
        )

    def run(
        self, scheduled: SchedulerOutput, run_plain: Callable[[SchedulerOutput], PendingOutput]
    ) -> PendingOutput | None:
        """Start the round; None where graphs cannot draft for it. Of its requests all results are known.

        Args:
            run_plain: starts the step without drafts, where there are none.
        """
        speculation, requests = self._speculation, self._batch.requests(scheduled)
        request_ids = [request.request_id for request in requests]
        drafts, host_ms = None, 0.0
        if self._chain is None:
            output, host_ms = speculation.propose(requests)
            counts, drafts = output.num_tokens, output.token_ids.numpy()
        else:
            counts = self._prepare(requests)
        if counts is None or not any(counts):
            self.forget()
            self._is_plain = counts is not None
            return None if counts is None else run_plain(scheduled)
        step = self._batch.build_round(scheduled, dict(zip(request_ids, counts, strict=True)), self._graphs.longest)
        if self._texts is None:
            length = self._graphs.start(step, self._uploads, drafts)
        else:
            assert isinstance(self._graphs, RoundGraphs)
            self._texts.upload(requests, self._uploads)
            granted = np.array([request.max_tokens for request in requests], dtype=np.int64)
            length = self._graphs.start(step, self._uploads, drafts, granted)
        times = speculation.begin_round(host_ms)
        if self._chain is not None and not self._are_drafted(requests, counts):
            self._graphs.draft()
        times.clock.mark()
        return self._go_on(step, length, step.num_draft_tokens.tolist(), times)

    def repeat(
        self, scheduled: SchedulerOutput, run_plain: Callable[[SchedulerOutput], PendingOutput]
    ) -> PendingOutput:
        """Start the last round once more, behind all that it will have accepted: the device knows where that ends.

        Args:
            run_plain: as in `run`. Behind a step without drafts there is nothing to go on from but its tokens, of which each
                request got one.
        """
        if self._last is None:
            assert self._is_plain
            return run_plain(scheduled)
        assert isinstance(self._graphs, RoundGraphs)
        step, length = self._batch.repeat_round(self._last, self._graphs.longest), self._num_ahead
        self._graphs.start_again(step, self._uploads)
        times = self._speculation.begin_round()
        times.clock.mark()
        num_draft_tokens = step.num_draft_tokens.tolist() if self._texts is None else None
        return self._go_on(step, length, num_draft_tokens, times)

    def _go_on(
        self, step: RoundInput, length: int, num_draft_tokens: list[int] | None, times: RoundTimes
    ) -> PendingOutput:
        """Verify a round that is drafted, and draft the next one.

        Args:
            num_draft_tokens: of each request; None: the device has looked up what there was.
        """
        packed, shape = self._graphs.verify()
        buffer = self._downloads.next(num_round_bytes(*shape))
        download = RoundDownload(step.request_ids, num_draft_tokens, packed, shape, buffer, times, self._not_finite)
        self._is_plain = False
        if self._head is not None:
            with self._speculation.preparing():
                self._graphs.go_on()
                self._head.observed()
            self._ahead = dict(zip(step.request_ids, step.tables.num_slots.tolist(), strict=True))
            self._num_ahead, self._last = length, step
        if self._texts is not None:
            with self._speculation.preparing():
                self._graphs.go_on()
            self._last = step
            rows = {step.request_ids[place]: int(step.rows[place]) for place in step.granted}
            return self._texts.follow(download, rows)
        return self._told(download)

    def _told(self, download: RoundDownload) -> PendingOutput:
        """As the host is told of the round."""
        return download

    def forget(self) -> None:
        """Another kind of step comes between: what has been drafted for the next round is not what comes next."""
        self._ahead.clear()
        self._last, self._is_plain = None, False

    def _are_drafted(self, requests: Sequence[DraftRequest], counts: Sequence[int]) -> bool:
        """Whether the round before has left these drafts, each with a slot for all that it was drafted from."""
        return all(
            count <= self._num_ahead
            and self._graphs.num_slots_to_draft(request.num_tokens, count) <= self._ahead.get(request.request_id, 0)
            for request, count in zip(requests, counts, strict=True)
        )

    def _prepare(self, requests: Sequence[DraftRequest]) -> list[int] | None:
        assert self._chain is not None
        if self._head is not None:
            return self._chain.prepare(requests)
        with self._speculation.preparing():  # a draft model may have to catch up
            return self._chain.prepare(requests)
