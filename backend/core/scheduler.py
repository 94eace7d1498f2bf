"""`Scheduler`: which tokens of which requests run in the next step.

There is no prefill phase and no decode phase: a request has `num_computed_tokens` and `num_tokens`, and each step lets the
first catch up with the second under a token budget (the idea of vLLM's v1 scheduler). The rules beyond that:

- Requests that need a single token go first, those served longest ago before the others. With a budget above their number
  none of them ever misses a step, whatever prompts arrive; with a smaller one they take turns, and one token is kept for
  prompts.
- What is left goes to prompts, first come first served. A long one (more than half the budget) takes at most half of what
  is left while another waits behind it, so that short ones are not held up; what then stays unused goes back to it.
- A request is admitted, first come first served, only when the pool can hold all its tokens so far beside what the
  running ones still need for theirs. It begins with the blocks that the prefix cache has of it.
- When the pool is exhausted, the request admitted last gives up its blocks and waits at the head of the queue; its tokens
  are kept and recomputed.

Steps may be scheduled before the results of earlier ones are known (asynchronous scheduling). `num_computed_tokens` moves
on when a step is scheduled, and a token that the step will sample counts as a placeholder until `update_from_output`:

- A request whose placeholders reach its last possible token is not scheduled any more: it is sure to end.
- One that ends for another reason while later steps hold it is over at once; what those steps sample for it is dropped.
  Its blocks are free at once too, for the worker carries out steps in their order.
- One that is preempted with placeholders keeps its place, and is not admitted before their ids are known.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter

from backend.core.kv_cache_manager import KVCacheManager
from backend.core.output import ModelRunnerOutput, RequestOutput, SchedulerOutput
from backend.core.step_plan import StepPlan, num_needed
from backend.request import FinishReason, Request


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
        # Per step without a result: the requests it samples. Not by id, which another request may have by then.
        self._in_flight: deque[tuple[int, list[Request]]] = deque()

    def add_request(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits `max_model_len` and the pool."""
        request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)
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
        """Choose the next step's tokens and take blocks for them. A step that can only preempt has none.

        An output with neither is no step and is not to be carried out: there is nothing to do before a result comes.
        """
        decodes, prompts = [], []
        for request in self.running:
            computed = request.num_computed_tokens
            if len(request.token_ids) + request.num_placeholder_tokens - computed > 1:
                prompts.append(request)
            elif computed + 1 < request.max_num_tokens:  # else its last possible token is on its way
                decodes.append(request)
        plan = StepPlan(self.max_num_batched_tokens, len(prompts))
        self._schedule_decodes(plan, decodes)
        self._schedule_prompts(plan, prompts)
        if self.waiting and not plan.preempted:
            self._admit_waiting(plan)
        if plan.num_prompts and not plan.preempted:
            self._spend_rest(plan)
        return self._to_output(plan)

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestOutput]:
        """Take in what the step computed; one entry per request that got a token or ended.

        Steps with tokens come here in the order in which they were scheduled.
        """
        if not scheduled.num_scheduled_tokens:
            return []
        step, requests = self._in_flight.popleft()
        if step != scheduled.step:
            raise RuntimeError(f"the result of step {scheduled.step} came before that of step {step}")
        sampled = output.sampled_token_ids
        outputs = []
        for request in requests:
            if request.status == "finished":
                continue
            request_id = request.request_id
            request.num_placeholder_tokens -= 1
            if request_id in sampled:
                new_token_ids = self._append(request, sampled[request_id])
                outputs.append(RequestOutput(request_id, new_token_ids, request.finish_reason))
            else:
                self._finish(request, "error")
                outputs.append(RequestOutput(request_id, [], "error", output.errors[request_id]))
        return outputs

    def _schedule_decodes(self, plan: StepPlan, decodes: list[Request]) -> None:
        kept = 0
        if len(decodes) >= plan.budget:
            decodes = sorted(decodes, key=attrgetter("last_scheduled_step"))
            if plan.num_prompts or (self._may_admit() and self._next_fits()):
                kept = 1 if plan.budget > 1 else self._step % 2  # a budget of one token serves both kinds in turn
        num_tokens = plan.num_tokens
        for request in decodes:
            if plan.budget <= kept:
                break
            if request.num_computed_tokens < request.num_slots:
                num_tokens[request] = 1
                plan.budget -= 1
            elif request.status == "running":  # and not preempted for one before it
                self._schedule(plan, request, 1)

    def _schedule_prompts(self, plan: StepPlan, prompts: list[Request]) -> None:
        for request in prompts:
            if plan.budget == 0:
                break
            if request.status != "running":
                continue
            num_tokens = self._share(plan, request, plan.num_prompts - 1)
            if request is not prompts[0] and num_tokens < min(num_needed(request), self.max_num_batched_tokens // 8):
                continue  # a sliver would cost a row of the batch and bring its first token no nearer
            self._schedule(plan, request, num_tokens)

    def _schedule(self, plan: StepPlan, request: Request, num_tokens: int) -> None:
        """Give a running request its blocks, preempting from the back of the line until it has them or is out itself."""
        while (allocation := self.kv_cache_manager.allocate_slots(request, num_tokens)) is None:
            victim = self.running[-1]
            plan.remove(victim)
            plan.num_prompts -= num_needed(victim) > 1
            plan.preempted.append(victim.request_id)
            self._preempt(victim)
            if victim is request:
                return
        plan.add(request, num_tokens, allocation.block_ids)

    def _may_admit(self) -> bool:
        """Whether a slot is free and all tokens of the next request are known."""
        return (
            bool(self.waiting) and len(self.running) < self.max_num_seqs and self.waiting[0].num_placeholder_tokens == 0
        )

    def _next_fits(self) -> bool:
        computed_blocks, _ = self.kv_cache_manager.get_computed_blocks(self.waiting[0])
        return self._head_fits(self._owed_blocks(), computed_blocks)

    def _head_fits(self, owed: int, computed_blocks: list[list[int]]) -> bool:
        """Whether the pool holds the next request beside the `owed` blocks; what it shares with others is there."""
        manager = self.kv_cache_manager
        pool = manager.pool
        num_shared = sum(pool.ref_cnt(block_id) > 0 for blocks in computed_blocks for block_id in blocks)
        room = pool.num_free_blocks + pool.num_evictable_blocks
        return owed + manager.blocks_needed(self.waiting[0].num_tokens) - num_shared <= room

    def _owed_blocks(self) -> int:
        """Blocks that running requests still need for the tokens they have, those on their way included."""
        return sum(map(self._missing_blocks, self.running))

    def _missing_blocks(self, request: Request) -> int:
        num_tokens = len(request.token_ids) + request.num_placeholder_tokens
        if num_tokens <= request.num_slots:
            return 0
        manager = self.kv_cache_manager
        return manager.blocks_needed(num_tokens) - manager.num_blocks_of(request)

    def _admit_waiting(self, plan: StepPlan) -> None:
        manager = self.kv_cache_manager
        owed: int | None = None
        while plan.budget > 0 and self._may_admit():
            owed = self._owed_blocks() if owed is None else owed
            request = self.waiting[0]
            computed_blocks, num_cached = manager.get_computed_blocks(request)
            if not self._head_fits(owed, computed_blocks):
                return
            manager.take_computed_blocks(request, computed_blocks)
            if request.num_preemptions == 0 and manager.caches_prefixes:
                request.num_cached_tokens = num_cached
            num_tokens = self._share(plan, request, plan.num_prompts)
            allocation = manager.allocate_slots(request, num_tokens)
            if allocation is None:
                raise RuntimeError("the pool refused blocks that it had counted as free")
            owed += self._missing_blocks(request)
            self.waiting.popleft()
            request.status = "running"
            self.running.append(request)
            plan.num_prompts += num_needed(request) > 1
            plan.admitted.append(request)
            held = [shared + new for shared, new in zip(computed_blocks, allocation.block_ids, strict=True)]
            plan.add(request, num_tokens, held)

    def _spend_rest(self, plan: StepPlan) -> None:
        """Hand what nobody else wanted to the prompts that had been held to a share."""
        for request, scheduled in list(plan.num_tokens.items()):
            more = min(num_needed(request) - scheduled, plan.budget)
            if more <= 0:
                continue
            allocation = self.kv_cache_manager.allocate_slots(request, scheduled + more)
            if allocation is not None:
                plan.add(request, more, allocation.block_ids)

    def _share(self, plan: StepPlan, request: Request, num_other_prompts: int) -> int:
        """Tokens this prompt may run now, at least one."""
        needed, available = num_needed(request), plan.budget
        others_wait = bool(self.waiting) and (len(self.waiting) > 1 or self.waiting[0] is not request)
        if needed > self.max_num_batched_tokens // 2 and (others_wait or num_other_prompts):
            available //= 2
        return max(1, min(needed, available))

    def _preempt(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        self.running.remove(request)
        request.status = "preempted"
        request.num_recompute_tokens = max(request.num_recompute_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _append(self, request: Request, sampled: list[int]) -> list[int]:
        """Take sampled tokens up to the first that ends the request; those of them that belong to its output."""
        token_ids = request.token_ids
        for index, token_id in enumerate(sampled):
            if token_id in request.ending_token_ids and len(token_ids) >= request.min_num_tokens:
                self._finish(request, "stop")
                return sampled[:index]
            token_ids.append(token_id)
            if len(token_ids) >= request.max_num_tokens:
                self._finish(request, "length")
                return sampled[: index + 1]
        return sampled

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if reason == "error":
            self.kv_cache_manager.uncache_blocks(request)
        elif request.next_cache_at <= request.num_computed_tokens:
            self.kv_cache_manager.cache_blocks(request)
        self.kv_cache_manager.free(request)
        if request.status == "running":
            self.running.remove(request)
            self._finished_request_ids.append(request.request_id)
        else:
            self.waiting.remove(request)
        request.status = "finished"
        request.finish_reason = reason
        del self.requests[request.request_id]

    def _to_output(self, plan: StepPlan) -> SchedulerOutput:
        if not plan.num_tokens and not plan.preempted:
            return SchedulerOutput(self._step, [], {}, [], {}, {}, [], [])
        plan.put_single_tokens_first()
        output = plan.to_output(self._step, self._finished_request_ids)
        if plan.num_tokens:
            self._in_flight.append((self._step, self._advance(plan.num_tokens)))
        self._step += 1
        self._finished_request_ids = []
        return output

    def _advance(self, rows: dict[Request, int]) -> list[Request]:
        """Count the step's tokens as computed; the requests that it samples, each with one more placeholder."""
        step, sampled = self._step, []
        for request, num_tokens in rows.items():
            request.last_scheduled_step = step
            request.num_computed_tokens = computed = request.num_computed_tokens + num_tokens
            if computed >= request.next_cache_at:
                self.kv_cache_manager.cache_blocks(request)
            if computed == len(request.token_ids) + request.num_placeholder_tokens:
                request.num_placeholder_tokens += 1
                sampled.append(request)
        return sampled
