"""`LLMEngine`: the step loop. schedule -> submit -> result -> update, and the records of each step.

With asynchronous scheduling a step is scheduled and submitted before the result of the one before it is taken, so that the
device has its next work when it finishes; all of the host's work then runs beside the device's. With speculation a step needs
that result, which tells how many drafts were accepted: it is submitted right behind it, and what the one before yielded is
delivered and recorded beside it. As long as nobody drafts, steps follow each other as without speculation.
"""

from __future__ import annotations

import os
import time
from collections import deque

from backend.config import EngineConfig
from backend.core.block_events import BlockEvent
from backend.core.block_hash import BlockHash
from backend.core.draft_cost import DraftCost
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.kv_layouts import length_limit
from backend.core.scheduler_factory import make_scheduler
from backend.engine.output_processor import OutputProcessor
from backend.engine.speculative_output import SpeculativeOutputProcessor
from backend.engine.step_recorder import FlyingStep, StepRecorder
from backend.errors import EngineError, RequestError
from backend.metrics.stats import StatsSink
from backend.request import Request, sample_ids
from backend.sampling_params import SamplingParams
from backend.tokenizer import Tokenizer
from backend.worker.executor import Executor
from backend.workload.targets import StreamEvent


class LLMEngine:
    """Args:
    config: fully resolved.
    executor: has its model loaded and its KV cache initialized.
    kv_groups: shapes of the model's KV.
    vocab_size: ids a prompt may hold.
    eos_token_ids: end a request unless it ignores them.
    prefix_key: of the prefix cache, see `KVCacheManager`; None when there is none.
    draft_cost: see `make_scheduler`.

    With SERVELAB_DEBUG in the environment when it is made, each step ends with a check of all KV blocks.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer,
        kv_groups: list[KVGroupSpec],
        vocab_size: int,
        eos_token_ids: frozenset[int],
        prefix_key: BlockHash | None = None,
        draft_cost: DraftCost | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = make_scheduler(config, kv_groups, prefix_key, draft_cost)
        self._bytes_per_block = max(group.bytes_per_token for group in kv_groups) * config.cache.block_size
        self._length_limit = length_limit(config)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        speculates = config.speculative.method != "none"
        self._output_processor = (SpeculativeOutputProcessor if speculates else OutputProcessor)(tokenizer)
        self._recorder: StepRecorder | None = None  # of the sink, if there is one
        self._in_flight: deque[FlyingStep] = deque()
        self._is_async = bool(config.scheduler.async_scheduling)
        self._goes_on = self._is_async and speculates  # submits a step before the one before it is recorded
        self._checks_blocks = bool(os.environ.get("SERVELAB_DEBUG"))  # a look at all of them: too slow to measure with

    def check_request(self, token_ids: list[int], sampling: SamplingParams) -> None:
        """Raise `RequestError` for a request that could never be served. Safe from any thread."""
        limit = self.scheduler.max_model_len
        if not token_ids:
            raise RequestError("the prompt is empty: it must hold at least one token")
        if len(token_ids) >= limit:
            raise RequestError(
                f"the prompt has {len(token_ids):,} tokens, but prompt and output together may have {limit:,} "
                f"({self._length_limit})"
            )
        highest, lowest = max(token_ids), min(token_ids)
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(f"token id {wrong} is not in the vocabulary: ids go from 0 to {self._vocab_size - 1}")
        if sampling.min_tokens and len(set(sampling.stop_token_ids)) >= self._vocab_size:
            raise RequestError("stop_token_ids holds the whole vocabulary: no token is left before min_tokens")
        for token_id in sampling.stop_token_ids:
            if token_id >= self._vocab_size:
                raise RequestError(
                    f"stop_token_ids holds {token_id}, which is not in the vocabulary: ids go from 0 to {self._vocab_size - 1}"
                )

    def add_request(
        self, request_id: str, token_ids: list[int], sampling: SamplingParams, arrival_time: float, priority: int = 0
    ) -> list[str]:
        """Queue a request that `check_request` has passed, or the `sampling.n` requests that its samples are.

        Returns their ids, see `sample_ids`. Raises `RequestError` for an id already in use.

        Args:
            priority: lower runs first, under `scheduler.policy = "priority"`.
        """
        ids = sample_ids(request_id, sampling.n)
        for sample_id in ids:
            if sample_id in self.scheduler.requests:
                raise RequestError(f"request id {sample_id!r} is already in use by an unfinished request")
        parent_id = request_id if sampling.n > 1 else None
        requests = [
            Request(
                sample_id,
                token_ids,
                sampling if parent_id is None else sampling.sample(index),
                self._eos_token_ids,
                arrival_time,
                priority,
                parent_id,
                index,
            )
            for index, sample_id in enumerate(ids)
        ]
        self.scheduler.add_samples(requests)
        for request in requests:
            self._output_processor.add_request(request)
        return ids

    def abort_request(self, request_id: str) -> list[StreamEvent]:
        """End a request, one sample of a prompt, or all of them; their last events. None of what is unknown or over."""
        requests = self.scheduler.requests
        ids = [request_id]
        if request_id not in requests:
            ids = [request.request_id for request in requests.values() if request.parent_id == request_id]
        outputs = [output for sample_id in ids if (output := self.scheduler.abort_request(sample_id))]
        return [self._output_processor.process(output, time.perf_counter())[0] for output in outputs]

    def has_unfinished_requests(self) -> bool:
        """Whether there is something to `step` for, a result that nobody waits for any more included."""
        return bool(self._in_flight) or self.scheduler.has_unfinished_requests()

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the prefix cache holds."""
        return self.scheduler.kv_cache_manager.num_cached_tokens

    def reset_prefix_cache(self) -> int:
        """Forget what has been computed, but for the requests under way; how many tokens the cache held."""
        return self.scheduler.kv_cache_manager.reset_prefix_cache()

    def set_sink(self, sink: StatsSink | None) -> None:
        """Send the records of following steps to `sink`, numbered from 0; the old sink gets the rest of its ledger.

        Steps in flight would be recorded by the new one: `drain` first.
        """
        if self._recorder is not None:
            self._recorder.flush()
        self._recorder = None if sink is None else StepRecorder(sink, self.scheduler, self._bytes_per_block)
        self.scheduler.kv_cache_manager.log_events(sink is not None)

    def step(self) -> list[StreamEvent]:
        """One iteration over the unfinished requests; what it yielded, in batch order.

        With asynchronous scheduling that is what the step submitted before it yielded, and without speculation nothing after an
        idle time.

        Raises `EngineError` when nothing can be scheduled, and in debug when KV blocks and their holders do not agree.
        """
        if not self._in_flight or self._may_run_ahead():
            step = self._submit()
            if step is not None:
                self._in_flight.append(step)
                if len(self._in_flight) == 1 and self._may_run_ahead():
                    return []
            elif not self._in_flight:
                raise EngineError("no waiting request can be scheduled although the engine is idle")
        step = self._in_flight.popleft()
        return self._complete(step, self._goes_on and not self._in_flight)

    def _may_run_ahead(self) -> bool:
        """Whether a second step can be submitted before the result of the one in flight is taken."""
        return self._is_async and self.scheduler.may_run_ahead(self._in_flight[0].scheduled)

    def drain(self) -> list[StreamEvent]:
        """Take the results of all steps in flight and start none; what they yielded."""
        events = []
        while self._in_flight:
            events += self._complete(self._in_flight.popleft())
        return events

    def _submit(self) -> FlyingStep | None:
        """Hand the next step to the executor; None when none can be scheduled."""
        started = time.perf_counter()
        manager = self.scheduler.kv_cache_manager
        scheduled = self.scheduler.schedule(self._in_flight[-1].scheduled if self._in_flight else None)
        if not scheduled.num_scheduled_tokens and not scheduled.preempted_request_ids:
            return None
        for new in scheduled.new_requests:
            request = self.scheduler.requests[new.request_id]
            if request.scheduled_time is None:
                request.scheduled_time = started
        key_frame = self._recorder.submit() if self._recorder is not None else None
        pool = manager.pool
        blocks = (pool.num_referenced_blocks, pool.num_evictable_blocks, pool.num_free_blocks)
        events = manager.take_events()
        if scheduled.preempted_request_ids:
            events = _name_preemptions(events, frozenset(scheduled.preempted_request_ids))
        submitted = time.perf_counter()  # before: an executor may carry the step out at once
        return FlyingStep(scheduled, self.executor.submit(scheduled), started, submitted, blocks, events, key_frame)

    def _complete(self, step: FlyingStep, go_on: bool = False) -> list[StreamEvent]:
        """Take the result of a step; what it yielded.

        Args:
            go_on: submit the next one as soon as this one's tokens are known.
        """
        output = step.pending.result()
        result = time.perf_counter()
        recorder, rounds = self._recorder, None
        if recorder is not None and output.rounds is not None:
            rounds = output.rounds, recorder.positions(output.rounds)
        outputs = self.scheduler.update_from_output(step.scheduled, output)
        if rounds is not None and not rounds[0].request_ids:  # all of them were cut
            rounds = None
        submission = 0.0
        if go_on and self.scheduler.has_unfinished_requests():
            begin = time.perf_counter()
            following = self._submit()
            if following is not None:
                self._in_flight.append(following)
            submission = time.perf_counter() - begin
        if output.rounds is not None:
            output.rounds.read_clock()
        events, stopped = self._output_processor.process_step(outputs, result)
        for request_id in stopped:
            self.scheduler.finish_request(request_id, "stop")
        if self._checks_blocks:
            self._check_blocks()
        if recorder is not None:
            is_last = not self.has_unfinished_requests()
            recorder.record(step, rounds, events, result, submission, self._in_flight, is_last)
        return events

    def _check_blocks(self) -> None:
        try:
            self.scheduler.kv_cache_manager.check_integrity()
        except RuntimeError as error:
            raise EngineError(f"the KV cache is inconsistent after a step (SERVELAB_DEBUG is set): {error}") from error


def _name_preemptions(events: list[BlockEvent], preempted: frozenset[str]) -> list[BlockEvent]:
    """To the pool, a request that is preempted and one that has ended are the same."""
    return [
        event._replace(kind="preempt") if event.kind == "free" and event.request_id in preempted else event
        for event in events
    ]
