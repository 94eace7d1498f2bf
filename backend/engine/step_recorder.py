"""`StepRecorder`: what a sink is told of each step, and the ledgers that go with it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import compress

from backend.core.block_events import BlockEvent, PoolState
from backend.core.output import DraftRounds, PendingOutput, SchedulerOutput
from backend.core.scheduler import Scheduler
from backend.metrics.ledger import KEY_FRAME_STEPS, LEDGER_KIND, LedgerChunk, StepLedger
from backend.metrics.speculation_ledger import SPECULATION_KIND, SpeculationLedger
from backend.metrics.stats import StatsSink, StepStats
from backend.workload.targets import StreamEvent

LEDGER_INTERVAL_S = 0.5  # a killed process loses no more of a ledger than of the other records


@dataclass(slots=True)
class FlyingStep:
    """A step in flight. Times are `time.perf_counter()` seconds."""

    scheduled: SchedulerOutput
    pending: PendingOutput
    started: float  # to be scheduled
    submitted: float
    blocks: tuple[int, int, int]  # referenced, evictable, free
    events: list[BlockEvent]  # of blocks, since the step before
    key_frame: PoolState | None  # the pool after them


class StepRecorder:
    """Numbers steps from 0. Made for one sink, and closed when that gets no more.

    Args:
        bytes_per_block: of KV.
    """

    def __init__(self, sink: StatsSink, scheduler: Scheduler, bytes_per_block: int) -> None:
        self._sink = sink
        self._scheduler = scheduler
        self._bytes_per_block = bytes_per_block
        self._ledger = StepLedger()
        self._speculation = SpeculationLedger()
        self._ledger_time = 0.0  # of the first step since the last chunk
        self._step = 0
        self._num_submitted = 0
        self._last_result = self._last_end = 0.0  # of the step before

    def submit(self) -> PoolState | None:
        """A further step is about to be submitted; the pool as it is, where a key frame of the ledger is due."""
        is_key = self._num_submitted % KEY_FRAME_STEPS == 0
        self._num_submitted += 1
        return self._scheduler.kv_cache_manager.state(self._scheduler.requests) if is_key else None

    def positions(self, rounds: DraftRounds) -> dict[str, int]:
        """How many output tokens those requests have that are to get more."""
        requests = self._scheduler.requests
        return {key: requests[key].num_output_tokens for key in rounds.request_ids if key in requests}

    def record(
        self,
        step: FlyingStep,
        rounds: tuple[DraftRounds, Mapping[str, int]] | None,
        events: list[StreamEvent],
        result: float,
        submission: float,
        following: Iterable[FlyingStep],
        is_last: bool,
    ) -> None:
        """A step has ended just now.

        Args:
            rounds: of speculation, and the `positions` before them.
            events: what it yielded.
            result: when that was known.
            submission: seconds since, for the step behind it.
            following: steps in flight.
            is_last: nothing is to be done behind it.
        """
        scheduled = step.scheduled
        num_tokens, kinds = scheduled.num_scheduled_tokens, scheduled.kinds.values()
        num_rejected = 0
        if rounds is not None:
            num_tokens, num_rejected = self._take_rounds(step, *rounds, events)
            for later in following:
                if later.scheduled.continues:  # submitted before anybody knew
                    _add_accepted(later, rounds[0])
        num_out, num_in = len(scheduled.swapped_out), len(scheduled.swapped_in)
        total = sum(num_tokens.values())
        if list(kinds).count("decode") == len(kinds):  # most steps
            decoded = total
        else:
            decoded = sum(compress(num_tokens.values(), map("decode".__eq__, kinds)))
        self._emit(
            LEDGER_KIND,
            self._ledger.append(self._step, num_tokens, num_tokens.values(), kinds, step.events, step.key_frame),
        )
        end = time.perf_counter()
        if self._ledger.num_steps == 1:
            self._ledger_time = step.started
        if end - self._ledger_time > LEDGER_INTERVAL_S or is_last:
            self.flush()
        self._sink.on_step(
            StepStats(
                step=self._step,
                end_time=end,
                duration_ms=(end - max(step.started, self._last_end)) * 1e3,
                schedule_ms=(step.submitted - step.started) * 1e3,
                execute_ms=(result - max(step.submitted, self._last_result)) * 1e3,
                process_ms=(end - result - submission) * 1e3,
                num_scheduled_requests=len(num_tokens),
                num_prefill_tokens=total - decoded,
                num_decode_tokens=decoded + num_rejected,
                num_output_tokens=sum([len(event.token_ids) for event in events]),
                num_running=len(self._scheduler.running),
                num_waiting=len(self._scheduler.waiting),
                num_preempted=len(scheduled.preempted_request_ids),
                num_referenced_blocks=step.blocks[0],
                num_evictable_blocks=step.blocks[1],
                num_free_blocks=step.blocks[2],
                num_swapped=scheduled.num_swapped,
                num_swapped_out_blocks=num_out,
                num_swapped_in_blocks=num_in,
                swapped_bytes=(num_out + num_in) * self._bytes_per_block,
            )
        )
        self._step += 1
        self._last_result, self._last_end = result, end

    def flush(self) -> None:
        """Give the sink all of the ledgers that it has not yet."""
        self._emit(LEDGER_KIND, self._ledger.flush())
        self._emit(SPECULATION_KIND, self._speculation.flush())

    def _take_rounds(
        self, step: FlyingStep, rounds: DraftRounds, positions: Mapping[str, int], events: list[StreamEvent]
    ) -> tuple[dict[str, int], int]:
        """Each request's tokens whose KV the step leaves behind, in batch order, and how many others it ran."""
        num_emitted = {event.request_id: len(event.token_ids) for event in events}
        self._emit(SPECULATION_KIND, self._speculation.append(self._step, rounds, positions, num_emitted))
        _add_accepted(step, rounds)
        num_tokens = step.scheduled.num_scheduled_tokens.copy()
        for request_id, num_accepted in zip(rounds.request_ids, rounds.num_accepted, strict=True):
            num_tokens[request_id] += num_accepted
        return num_tokens, sum(rounds.num_verified) - sum(rounds.num_accepted)

    def _emit(self, kind: str, chunk: LedgerChunk | None) -> None:
        if chunk is not None:
            self._sink.on_chunk(kind, *chunk)


def _add_accepted(step: FlyingStep, rounds: DraftRounds) -> None:
    """Count accepted drafts among the tokens that a step's key frame has in blocks."""
    if step.key_frame is None:
        return
    in_blocks = step.key_frame.num_tokens
    accepted = zip(rounds.request_ids, rounds.num_accepted, strict=True)
    grown = {key: in_blocks[key] + count for key, count in accepted if key in in_blocks}
    step.key_frame = step.key_frame._replace(num_tokens={**in_blocks, **grown})
