"""`Scheduler`: which tokens of which requests run in the next step.

There is no prefill phase and no decode phase: a request has `num_computed_tokens` and `num_tokens`, and each step lets the
first catch up with the second under a token budget (the idea of vLLM's v1 scheduler). The rules beyond that:

- Requests that need a single token go first, those served longest ago before the others. With a budget above their number
  none of them ever misses a step, whatever prompts arrive; with a smaller one they take turns, and one token is kept for
  prompts.
- What is left goes to prompts, first come first served. A long one (more than half the budget) takes at most half of what
  is left while another waits behind it, so that short ones are not held up; what then stays unused goes back to it.
- A request is admitted, first come first served, only when the pool can hold all its tokens so far beside what the
  running ones still need for theirs.
- When the pool is exhausted, the request admitted last gives up its blocks and waits at the head of the queue; its tokens
  are kept and recomputed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from backend.core.kv_cache_manager import KVCacheManager
from backend.core.output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    RequestOutput,
    SchedulerOutput,
    StepKind,
)
from backend.request import FinishReason, Request


@dataclass(slots=True)
class _Plan:
    """A step while it is being put together."""

    budget: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_block_ids: dict[str, list[list[int]]] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)
    preempted: list[str] = field(default_factory=list)

    def add(self, request: Request, num_tokens: int, block_ids: list[list[int]]) -> None:
        known = self.new_block_ids.setdefault(request.request_id, [[] for _ in block_ids])
        for blocks, more in zip(known, block_ids, strict=True):
            blocks.extend(more)
        self.num_scheduled_tokens[request.request_id] = (
            self.num_scheduled_tokens.get(request.request_id, 0) + num_tokens
        )
        self.budget -= num_tokens

    def remove(self, request: Request) -> None:
        self.budget += self.num_scheduled_tokens.pop(request.request_id, 0)
        self.new_block_ids.pop(request.request_id, None)


class Scheduler:
    """Args:
    kv_cache_manager: the pool requests draw on.
    max_num_seqs: most requests in one step.
    max_num_batched_tokens: token budget of one step; may be below `max_num_seqs`.
    max_model_len: longest prompt plus output; the pool must be able to hold one such request.
    """

    def __init__(
        self, kv_cache_manager: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self._step = 0
        self._finished_request_ids: list[str] = []

    def add_request(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits `max_model_len` and the pool."""
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request wherever it stands; None for one that is unknown or already over."""
        return self.finish_request(request_id, "abort")

    def finish_request(self, request_id: str, reason: FinishReason, error: str | None = None) -> RequestOutput | None:
        """End a request for a reason outside the scheduler, such as a stop string."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._finish(request, reason)
        return RequestOutput(request_id, [], reason, error)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and take blocks for them. A step that can only preempt has none."""
        plan = _Plan(self.max_num_batched_tokens)
        self._schedule_decodes(plan)
        self._schedule_prompts(plan)
        if not plan.preempted:
            self._admit_waiting(plan)
            self._spend_rest(plan)
        return self._to_output(plan)

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestOutput]:
        """Take in what the step computed; one entry per request that got a token or ended."""
        outputs = []
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_computed_tokens += num_tokens
            error = output.errors.get(request_id)
            if error is not None:
                self._finish(request, "error")
                outputs.append(RequestOutput(request_id, [], "error", error))
                continue
            sampled = output.sampled_token_ids.get(request_id)
            if sampled:
                outputs.append(self._append(request, sampled))
        return outputs

    def _schedule_decodes(self, plan: _Plan) -> None:
        decodes = sorted(
            (request for request in self.running if _num_needed(request) == 1),
            key=lambda request: request.last_scheduled_step,
        )
        kept = 0
        if len(decodes) >= plan.budget and (
            len(decodes) < len(self.running) or self._head_can_be_admitted(self._owed_blocks())
        ):
            kept = 1 if plan.budget > 1 else self._step % 2  # a budget of one token serves both kinds in turn
        for request in decodes:
            if plan.budget <= kept:
                break
            if request.status == "running":  # and not preempted for one before it
                self._schedule(plan, request, 1)

    def _schedule_prompts(self, plan: _Plan) -> None:
        prompts = [request for request in self.running if _num_needed(request) > 1]
        for request in prompts:
            num_tokens = self._share(plan, request)
            if plan.budget == 0:
                break
            if request is not prompts[0] and num_tokens < min(_num_needed(request), self.max_num_batched_tokens // 8):
                continue  # a sliver would cost a row of the batch and bring its first token no nearer
            if request.status == "running":
                self._schedule(plan, request, num_tokens)

    def _schedule(self, plan: _Plan, request: Request, num_tokens: int) -> None:
        """Give a running request its blocks, preempting from the back of the line until it has them or is out itself."""
        while (allocation := self.kv_cache_manager.allocate_slots(request, num_tokens)) is None:
            victim = self.running[-1]
            plan.remove(victim)
            self._preempt(victim)
            plan.preempted.append(victim.request_id)
            if victim is request:
                return
        plan.add(request, num_tokens, allocation.block_ids)

    def _head_can_be_admitted(self, owed: int) -> bool:
        """Whether a slot is free and the pool holds the next request beside the `owed` blocks."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        manager = self.kv_cache_manager
        room = manager.pool.num_free_blocks + manager.pool.num_evictable_blocks
        return owed + manager.blocks_needed(self.waiting[0].num_tokens) <= room

    def _owed_blocks(self) -> int:
        """Blocks that running requests still need for the tokens they have."""
        return sum(map(self._missing_blocks, self.running)) if self.waiting else 0

    def _missing_blocks(self, request: Request) -> int:
        manager = self.kv_cache_manager
        return max(0, manager.blocks_needed(request.num_tokens) - manager.num_blocks_of(request))

    def _admit_waiting(self, plan: _Plan) -> None:
        manager = self.kv_cache_manager
        owed = self._owed_blocks()
        while plan.budget > 0 and self._head_can_be_admitted(owed):
            request = self.waiting[0]
            num_tokens = self._share(plan, request)
            allocation = manager.allocate_slots(request, num_tokens)
            if allocation is None:
                raise RuntimeError("the pool refused blocks that it had counted as free")
            owed += self._missing_blocks(request)
            self.waiting.popleft()
            request.status = "running"
            self.running.append(request)
            plan.admitted.add(request.request_id)
            plan.add(request, num_tokens, allocation.block_ids)

    def _spend_rest(self, plan: _Plan) -> None:
        """Hand what nobody else wanted to the prompts that had been held to a share."""
        for request in self.running:
            scheduled = plan.num_scheduled_tokens.get(request.request_id, 0)
            more = min(_num_needed(request) - scheduled, plan.budget)
            if scheduled == 0 or more <= 0:
                continue
            allocation = self.kv_cache_manager.allocate_slots(request, scheduled + more)
            if allocation is not None:
                plan.add(request, more, allocation.block_ids)

    def _share(self, plan: _Plan, request: Request) -> int:
        """Tokens this prompt may run now, at least one."""
        needed, available = _num_needed(request), plan.budget
        others_wait = bool(self.waiting) and (len(self.waiting) > 1 or self.waiting[0] is not request)
        if needed > self.max_num_batched_tokens // 2 and (others_wait or self._another_prompt_runs(request)):
            available //= 2
        return max(1, min(needed, available))

    def _another_prompt_runs(self, request: Request) -> bool:
        return any(other is not request and _num_needed(other) > 1 for other in self.running)

    def _preempt(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        self.running.remove(request)
        request.status = "preempted"
        request.num_recompute_tokens = max(request.num_recompute_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _append(self, request: Request, sampled: list[int]) -> RequestOutput:
        """Take sampled tokens up to the first that ends the request."""
        new_token_ids: list[int] = []
        params = request.sampling_params
        for token_id in sampled:
            if token_id in request.ending_token_ids and request.num_output_tokens >= params.min_tokens:
                self._finish(request, "stop")
                break
            request.token_ids.append(token_id)
            new_token_ids.append(token_id)
            if request.num_output_tokens >= params.max_tokens or request.num_tokens >= self.max_model_len:
                self._finish(request, "length")
                break
        return RequestOutput(request.request_id, new_token_ids, request.finish_reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.kv_cache_manager.free(request)
        if request.status == "running":
            self.running.remove(request)
            self._finished_request_ids.append(request.request_id)
        else:
            self.waiting.remove(request)
        request.status = "finished"
        request.finish_reason = reason
        del self.requests[request.request_id]

    def _to_output(self, plan: _Plan) -> SchedulerOutput:
        new_requests, cached_requests = [], []
        # Single-token rows first: attention handles them as one batch.
        order = sorted(plan.num_scheduled_tokens.items(), key=lambda item: item[1] > 1)
        for request_id, _ in order:
            request = self.requests[request_id]
            request.last_scheduled_step = self._step
            if request_id in plan.admitted:
                new_requests.append(
                    NewRequestData(
                        request_id=request_id,
                        token_ids=list(request.token_ids),
                        num_prompt_tokens=request.num_prompt_tokens,
                        sampling_params=request.sampling_params,
                        banned_token_ids=tuple(sorted(request.ending_token_ids)),
                        block_ids=plan.new_block_ids[request_id],
                        num_computed_tokens=request.num_computed_tokens,
                    )
                )
            else:
                cached_requests.append(
                    CachedRequestData(request_id, plan.new_block_ids[request_id], request.num_computed_tokens)
                )
        output = SchedulerOutput(
            step=self._step,
            new_requests=new_requests,
            cached_requests=cached_requests,
            num_scheduled_tokens=dict(order),
            kinds={request_id: _kind(self.requests[request_id]) for request_id, _ in order},
            finished_request_ids=self._finished_request_ids,
            preempted_request_ids=plan.preempted,
        )
        self._step += 1
        self._finished_request_ids = []
        return output


def _num_needed(request: Request) -> int:
    """Tokens until the next one can be sampled."""
    return request.num_tokens - request.num_computed_tokens


def _kind(request: Request) -> StepKind:
    """What the next tokens of a request are: a chunk that spans two kinds counts as the first."""
    if request.num_computed_tokens < request.num_recompute_tokens:
        return "recompute"
    return "prefill" if request.num_computed_tokens < request.num_prompt_tokens else "decode"
