"""Scheduling policies: who is served first in a step, who is admitted first, and who gives up its blocks.

A policy orders; what it orders, the scheduler does. With each of them a request gets the same tokens.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import deque
from typing import Protocol

from backend.core.step_plan import StepPlan
from backend.request import Request


class StepStages(Protocol):
    """What a step can be filled with, in an order that the policy chooses. Each takes from the plan's budget.

    Whoever is admitted in a step is not preempted in it: `admit_waiting` leaves the running ones what they need.
    """

    def schedule_decodes(self, plan: StepPlan, decodes: list[Request]) -> None:
        """Running requests that need a single token."""
        ...

    def schedule_prompts(self, plan: StepPlan, prompts: list[Request]) -> None:
        """Running requests that need more than one, in the order given."""
        ...

    def admit_waiting(self, plan: StepPlan) -> None:
        """Waiting requests while there is room; nobody after a preemption."""
        ...

    def spend_rest(self, plan: StepPlan) -> None:
        """What is left goes to prompts of this step that were held to a share."""
        ...


class FirstComeFirstServed:
    """`fcfs`: decodes first, prompts with what they leave (the order of Sarathi-Serve, Agrawal et al. 2024).

    - Requests that need a single token go first, those served longest ago before the others. With a budget above their
      number none of them ever misses a step, whatever prompts arrive; with a smaller one they take turns.
    - A prompt of more than half the budget takes at most half of what is left while another waits behind it, so that short
      ones are not held up; what then stays unused goes back to it.
    - The request admitted last gives up its blocks first, and waits at the head of the queue.

    Nobody starves: whoever came first is never preempted for another.
    """

    def enqueue(self, waiting: deque[Request], request: Request) -> None:
        """Let a new request wait."""
        waiting.append(request)

    def put_back(self, waiting: deque[Request], request: Request) -> None:
        """Let a preempted request wait."""
        waiting.appendleft(request)

    def victim(self, running: list[Request]) -> Request:
        """Who gives up its blocks.

        Args:
            running: in order of admission, at least one.
        """
        return running[-1]

    def turn(self, request: Request) -> tuple[int, ...]:
        """Sort key of requests that need a single token, when the budget is not enough for all."""
        return (request.last_scheduled_step,)

    def share(self, plan: StepPlan, needed: int, others_wait: bool) -> int:
        """How many of the `needed` tokens a prompt may run now, at most `plan.budget`, which is at least 1.

        0 lets a waiting prompt wait on; one that is running gets at least one token.

        Args:
            others_wait: there are other prompts, running or waiting.
        """
        available = plan.budget
        if others_wait and needed > plan.max_num_batched_tokens // 2:
            available //= 2
        return max(1, min(needed, available))

    def fill(self, stages: StepStages, plan: StepPlan, decodes: list[Request], prompts: list[Request]) -> None:
        """Put the step together.

        Args:
            decodes: running requests that need a single token; so `prompts`, more than one. In order of admission.
        """
        stages.schedule_decodes(plan, decodes)
        stages.schedule_prompts(plan, prompts)
        stages.admit_waiting(plan)
        stages.spend_rest(plan)


class PrefillFirst(FirstComeFirstServed):
    """`prefill_first`: as long as there is a prompt that can run, steps hold prompts only (as in early vLLM).

    A prompt runs whole, in a step with room for all of it; one that is longer than the budget takes several steps in a row.
    First tokens come early, and decodes stall meanwhile: with prompts that keep arriving and free slots for them, a running
    request starves.
    """

    def share(self, plan: StepPlan, needed: int, others_wait: bool) -> int:
        if needed <= plan.budget:
            return needed
        return plan.budget if needed > plan.max_num_batched_tokens else 0

    def fill(self, stages: StepStages, plan: StepPlan, decodes: list[Request], prompts: list[Request]) -> None:
        ends = [request for request in decodes if _awaits_first_token(request)]
        stages.schedule_prompts(plan, ends + prompts)
        stages.admit_waiting(plan)
        if not plan.num_tokens:
            stages.schedule_decodes(plan, decodes)


class Priority(FirstComeFirstServed):
    """`priority`: the lowest `Request.priority` is admitted, served and kept first; of equal ones, the earliest arrival.

    Steps are filled as with `fcfs`, decodes first, in this order among decodes and among prompts. The pool takes blocks from
    the worst one; a free slot and free blocks are what a waiting request needs, it preempts nobody. A request starves while
    better ones keep coming: it is not admitted, or, with a budget or a pool too small for all that run, not served.
    """

    def enqueue(self, waiting: deque[Request], request: Request) -> None:
        insort_right(waiting, request, key=_rank)

    def put_back(self, waiting: deque[Request], request: Request) -> None:
        insort_left(waiting, request, key=_rank)

    def victim(self, running: list[Request]) -> Request:
        return max(reversed(running), key=_rank)

    def turn(self, request: Request) -> tuple[int, ...]:
        return (request.priority, request.last_scheduled_step)

    def fill(self, stages: StepStages, plan: StepPlan, decodes: list[Request], prompts: list[Request]) -> None:
        super().fill(stages, plan, decodes, sorted(prompts, key=_rank))


def _awaits_first_token(request: Request) -> bool:
    """Of a request that needs a single token: it is the last one of its prompt."""
    return len(request.token_ids) + request.num_placeholder_tokens == request.num_prompt_tokens


def _rank(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_time
