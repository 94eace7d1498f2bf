"""`RecomputeScheduler`: generation without a KV cache (`cache.layout = none`), as a scheduler that forgets.

Every step runs all tokens of a request, from position 0. Its blocks are taken for the step, because attention reads keys and
values where it always does, and given back before the next. The worker, which keeps a request's ids but not those it has
sampled itself, is told of a request anew in each step.
"""

from __future__ import annotations

from backend.core.output import SchedulerOutput
from backend.core.scheduler import Scheduler
from backend.core.step_plan import StepPlan
from backend.request import Request


class RecomputeScheduler(Scheduler):
    """Needs the result of a step before it schedules the next: the ids of all tokens have to be known.

    `max_num_batched_tokens` must hold `max_model_len - 1` tokens, which the last step of the longest request runs. A request
    is admitted when budget and pool hold it beside all that run. When they outgrow either, they take turns; nobody is
    preempted, for nobody has anything to lose.
    """

    keeps_blocks = False

    def schedule(self, behind: SchedulerOutput | None = None) -> SchedulerOutput:
        for request in self.running:
            if request.num_computed_tokens:
                self._forget(request)
        return super().schedule(behind)

    def schedule_decodes(self, plan: StepPlan, decodes: list[Request]) -> None:
        for request in sorted(decodes, key=self._policy.turn):
            if request.num_tokens > plan.budget:
                continue
            allocation = self.kv_cache_manager.allocate_slots(request, request.num_tokens)
            if allocation is not None:
                plan.admitted.append(request)
                plan.add(request, request.num_tokens, allocation.block_ids)

    def _running_by_kind(self) -> tuple[list[Request], list[Request]]:
        """Whoever runs has had its first token in the step that admitted it: all need one more."""
        return list(self.running), []

    def _next_request(self) -> Request | None:
        request = super()._next_request()
        if request is None:
            return None
        total = request.num_tokens + sum(other.num_tokens for other in self.running)
        return request if total <= self.max_num_batched_tokens else None

    def _share(self, plan: StepPlan, needed: int, others_wait: bool) -> int:
        return needed  # whoever is admitted has room for all of it

    def _forget(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        request.num_recompute_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        self._finished_request_ids.append(request.request_id)
