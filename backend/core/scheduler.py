"""`Scheduler`: which tokens of which requests run in the next step.

There is no prefill phase and no decode phase: a request has `num_computed_tokens` and `num_tokens`, and each step lets the
first catch up with the second under a token budget (the idea of vLLM's v1 scheduler). In which order is the policy's choice
(`policies`), and who may join the running ones the batching's (`admission`). The rules beyond that:

- With a budget below the number of requests that need a single token, one token is kept for prompts.
- A request is admitted only when the pool can hold all its tokens so far beside what the running ones still need for
  theirs. It begins with the blocks that the prefix cache has of it.
- When the pool is exhausted, the policy's victim gives up its blocks and waits again; its tokens are kept and recomputed,
  or its KV waits in host memory, see `swapping`. Nobody is admitted in a step that preempts.

Steps may be scheduled before the results of earlier ones are known (asynchronous scheduling). `num_computed_tokens` moves
on when a step is scheduled, and a token that the step will sample counts as a placeholder until `update_from_output`:

- A request whose placeholders reach its last possible token is not scheduled any more: it is sure to end.
- One that ends for another reason while later steps hold it is over at once; what those steps sample for it is dropped.
  Its blocks are free at once too, for the worker carries out steps in their order.
- One that is preempted with placeholders keeps its place, and is not admitted before their ids are known.

The samples of a prompt are requests that share its blocks, see `prompt_samples`.
"""

from __future__ import annotations

from collections import deque

from backend.core.admission import Batching, ContinuousBatching, fits, missing_blocks
from backend.core.kv_cache_manager import KVCacheManager
from backend.core.output import ModelRunnerOutput, RequestOutput, SchedulerOutput
from backend.core.policies import FirstComeFirstServed
from backend.core.prompt_samples import PromptHeirs
from backend.core.step_plan import StepPlan, num_needed
from backend.request import FinishReason, Request


class Scheduler:
    """Args:
    kv_cache_manager: the pool requests draw on.
    max_num_seqs: most requests in one step.
    max_num_batched_tokens: token budget of one step; may be below `max_num_seqs`.
    max_model_len: longest prompt plus output; the pool must be able to hold one such request.
    policy: `FirstComeFirstServed` unless another is given.
    batching: `ContinuousBatching` unless another is given.
    """

    keeps_blocks = True  # of a request from step to step

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: FirstComeFirstServed | None = None,
        batching: Batching | None = None,
    ) -> None:
        self.kv_cache_manager = kv_cache_manager
        self._shares_blocks = kv_cache_manager.shares_blocks and self.keeps_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._policy = policy or FirstComeFirstServed()
        self._batching = batching or ContinuousBatching()
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()  # in the order in which the policy lets them in
        self.running: list[Request] = []  # in order of admission
        self._step = 0
        self._finished_request_ids: list[str] = []
        self._heirs = PromptHeirs(kv_cache_manager)
        # Per step without a result: the requests it samples. Not by id, which another request may have by then.
        self._in_flight: deque[tuple[int, list[Request]]] = deque()

    def add_request(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits `max_model_len` and the pool."""
        request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)
        self.requests[request.request_id] = request
        self._policy.enqueue(self.waiting, request)

    def add_samples(self, requests: list[Request]) -> None:
        """Queue the samples of one prompt, as `add_request`."""
        samples = list(requests) if len(requests) > 1 and self._shares_blocks else None
        for request in requests:
            request.samples = samples
            self.add_request(request)

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

    def schedule(self, behind: SchedulerOutput | None = None) -> SchedulerOutput:
        """Choose the next step's tokens and take blocks for them. A step that can only preempt has none.

        Args:
            behind: the last step, while its result is not known; then `may_run_ahead` has said that it need not be.

        An output with neither is no step and is not to be carried out: there is nothing to do before a result comes.
        """
        decodes, prompts = self._running_by_kind()
        plan = StepPlan(self.max_num_batched_tokens, len(prompts))
        self._policy.fill(self, plan, decodes, prompts)
        return self._to_output(plan)

    def may_run_ahead(self, last: SchedulerOutput) -> bool:
        """Whether a step can be scheduled before the result of the last one is known."""
        return True

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
            token_ids = sampled.get(request_id)
            if token_ids is None:
                self._finish(request, "error")
                outputs.append(RequestOutput(request_id, [], "error", output.errors[request_id]))
                continue
            new_token_ids, reason = request.append(token_ids)
            if reason is not None:
                self._finish(request, reason)
            outputs.append(RequestOutput(request_id, new_token_ids, reason))
        return outputs

    def schedule_decodes(self, plan: StepPlan, decodes: list[Request]) -> None:
        """See `StepStages`; so the other public stages."""
        kept = 0
        if len(decodes) >= plan.budget:
            decodes = sorted(decodes, key=self._policy.turn)
            if plan.num_prompts or self._next_fits():
                kept = 1 if plan.budget > 1 else self._step % 2  # a budget of one token serves both kinds in turn
        if plan.preempted:
            decodes = [request for request in decodes if request.status == "running"]
        if len(decodes) <= plan.budget - kept:  # then all of them are served but those that are preempted now
            plan.add_single_tokens(decodes)
            for request in [request for request in decodes if request.num_computed_tokens >= request.num_slots]:
                if request.status == "running":
                    self._schedule(plan, request, 1, counted=1)
            return
        for request in decodes:
            if plan.budget <= kept:
                break
            if request.num_computed_tokens < request.num_slots:
                plan.add_single_tokens((request,))
            elif request.status == "running":  # and not preempted for one before it
                self._schedule(plan, request, 1)

    def schedule_prompts(self, plan: StepPlan, prompts: list[Request]) -> None:
        for request in prompts:
            if plan.budget == 0:
                break
            if request.status != "running":
                continue
            needed = num_needed(request)
            num_tokens = self._share(plan, needed, bool(self.waiting) or plan.num_prompts > 1)
            if request is not prompts[0] and num_tokens < min(needed, self.max_num_batched_tokens // 8):
                continue  # a sliver would cost a row of the batch and bring its first token no nearer
            self._schedule(plan, request, num_tokens)

    def admit_waiting(self, plan: StepPlan) -> None:
        if not self.waiting or plan.preempted:
            return
        manager = self.kv_cache_manager
        owed: int | None = None
        while plan.budget > 0 and (request := self._next_request()) is not None:
            owed = self._owed_blocks() if owed is None else owed
            computed = manager.get_computed_blocks(request)
            if not fits(manager, request, computed, owed):
                if self._heirs.give_up(request if self.running else None):
                    continue
                return
            others_wait = len(self.waiting) > 1 or plan.num_prompts > 0
            num_tokens = self._share(plan, request.num_tokens - computed.num_tokens, others_wait)
            if num_tokens == 0:
                return
            plan.swapped_in = [*plan.swapped_in, *manager.take_computed_blocks(request, computed)]
            if request.num_preemptions == 0 and request.sample_index == 0 and manager.caches_prefixes:
                request.num_cached_tokens = computed.num_tokens
            allocation = manager.allocate_slots(request, num_tokens)
            if allocation is None:
                raise RuntimeError("the pool refused blocks that it had counted as free")
            owed += missing_blocks(manager, request)
            self.waiting.remove(request)
            self._heirs.admit(request)
            request.status = "running"
            self.running.append(request)
            plan.num_prompts += num_needed(request) > 1
            plan.admitted.append(request)
            plan.add_copies(allocation.copies)
            plan.add(request, num_tokens, manager.block_ids_of(request))

    def spend_rest(self, plan: StepPlan) -> None:
        if not plan.num_prompts or plan.preempted:
            return
        for request, scheduled in list(plan.num_tokens.items()):
            more = min(num_needed(request) - scheduled, plan.budget)
            if more <= 0:
                continue
            allocation = self.kv_cache_manager.allocate_slots(request, scheduled + more)
            if allocation is not None:
                plan.add(request, more, allocation.block_ids)

    def _running_by_kind(self) -> tuple[list[Request], list[Request]]:
        """Running requests that need a single token, and those that need more; both in order of admission."""
        decodes, prompts = [], []
        for request in self.running:
            computed = request.num_computed_tokens
            if len(request.token_ids) + request.num_placeholder_tokens - computed > 1:
                prompts.append(request)
            elif not request.awaits_last_token:
                decodes.append(request)
        return decodes, prompts

    def _schedule(self, plan: StepPlan, request: Request, num_tokens: int, counted: int = 0) -> None:
        """Give a running request its blocks, preempting until it has them or is out itself.

        Args:
            counted: of its tokens, those that the plan has already.
        """
        while (allocation := self.kv_cache_manager.allocate_slots(request, num_tokens)) is None:
            if self._heirs.give_up():
                continue
            victim = self._policy.victim(self.running)
            plan.remove(victim)
            plan.num_prompts -= num_needed(victim) > 1
            self._preempt(plan, victim)
            if victim is request:
                return
        plan.add(request, num_tokens - counted, allocation.block_ids)

    def _next_request(self) -> Request | None:
        """Who is to be admitted next, if a slot is free and all its tokens are known."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return None
        request = self._batching.next_request(self.waiting, self.kv_cache_manager, self.max_num_seqs)
        return request if request is not None and request.num_placeholder_tokens == 0 else None

    def _next_fits(self) -> bool:
        request = self._next_request()
        if request is None:
            return False
        computed = self.kv_cache_manager.get_computed_blocks(request)
        return fits(self.kv_cache_manager, request, computed, self._owed_blocks())

    def _owed_blocks(self) -> int:
        """Blocks that running requests still need."""
        return sum(missing_blocks(self.kv_cache_manager, request) for request in self.running)

    def _share(self, plan: StepPlan, needed: int, others_wait: bool) -> int:
        """Tokens that a prompt may run now."""
        return self._policy.share(plan, needed, others_wait)

    def _preempt(self, plan: StepPlan, request: Request) -> None:
        plan.preempted.append(request.request_id)
        self.running.remove(request)
        swapped_out = self.kv_cache_manager.swap_out(request)
        if swapped_out is not None:
            request.status = "swapped"
            plan.swapped_out = [*plan.swapped_out, *swapped_out]
            plan.num_swapped += 1
        else:
            self.kv_cache_manager.free(request)
            request.status = "preempted"
            request.num_recompute_tokens = max(request.num_recompute_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._policy.put_back(self.waiting, request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if reason == "error":
            self.kv_cache_manager.uncache_blocks(request)
        elif request.next_cache_at <= request.num_computed_tokens:
            self.kv_cache_manager.cache_blocks(request)
        if request.samples is not None:
            self._heirs.end(request, self.waiting, reason)
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
