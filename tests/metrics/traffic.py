"""Traffic over a small pool with what the scheduler thought of every request in every step, and the ledger of it."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from backend.core.output import SchedulerOutput
from backend.engine.llm_engine import _name_preemptions
from backend.metrics.ledger_format import LedgerEntry, LedgerStep
from backend.metrics.request_timeline import RunTimelines
from tests.core.paged_machine import VOCAB, Lab


@dataclass
class Traffic:
    lab: Lab
    steps: list[LedgerStep] = field(default_factory=list)
    times: list[tuple[int, float, float]] = field(default_factory=list)  # step, start, end
    states: list[dict[str, str]] = field(default_factory=list)  # of a step: what each request there is did in it
    arrivals: dict[str, float] = field(default_factory=dict)
    finishes: dict[str, float] = field(default_factory=dict)
    emissions: dict[str, list[float]] = field(default_factory=dict)
    prompt_lens: dict[str, int] = field(default_factory=dict)

    def timelines(self) -> RunTimelines:
        timelines = RunTimelines()
        timelines.extend(self.steps, self.times)
        return timelines

    def state_at(self, request_id: str, time: float) -> str | None:
        """What the request does then, looked up in the states; None outside its life and before the first step."""
        if not self.arrivals[request_id] <= time < self.finishes[request_id]:
            return None
        starts = [start for _, start, _ in self.times]
        began = [step for step, start in enumerate(starts) if start <= time]
        return self.states[began[-1]].get(request_id, "queued") if began else "queued"


def traffic(
    *,
    num_requests: int = 40,
    seed: int = 5,
    ahead: int = 0,
    batching: str = "continuous",
    policy: str = "fcfs",
    layout: str = "paged",
    all_at_once: bool = False,
    num_blocks: int = 30,
    budget: int = 24,
    max_prompt_len: int = 40,
    max_num_seqs: int = 6,
) -> Traffic:
    """Prompts longer than the budget, a pool too small for all that run, and more of them than a step can decode.

    Requests arrive while steps run. Steps last 1 to 3 s with a moment between them, and the result comes before the end.
    """
    rng = random.Random(seed)
    lab = Lab(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if layout == "paged" else 80,
        max_model_len=80,
        ahead=ahead,
        batching=batching,
        policy=policy,
        layout=layout,
    )
    lab.manager.log_events(True)
    made, clock, index = Traffic(lab), 1.0, 0
    in_flight: deque[tuple[SchedulerOutput, list]] = deque()

    def complete(clock: float) -> float:
        scheduled, events = in_flight.popleft()
        step, start = len(made.steps), clock
        result = start + rng.uniform(1, 3)
        end = result + 0.1
        rows = scheduled.num_scheduled_tokens
        entries = tuple(LedgerEntry(key, count, scheduled.kinds[key]) for key, count in rows.items())
        made.steps.append(LedgerStep(step, entries, tuple(events)))
        made.times.append((step, start, end))
        outputs = lab.scheduler.update_from_output(scheduled, lab.machine.execute(scheduled))
        for output in outputs:
            lab.take(output)
            if output.new_token_ids:
                made.emissions[output.request_id].append(result)
            if output.finish_reason:
                made.finishes[output.request_id] = result
        return end + 0.05

    while index < num_requests or lab.scheduler.has_unfinished_requests() or in_flight:
        while index < num_requests and (all_at_once or rng.random() < 0.4 or not lab.scheduler.requests):
            key = f"7-{index}"
            length = rng.randint(1, max_prompt_len)
            lab.add(key, rng.choices(range(VOCAB), k=length), max_tokens=rng.randint(1, 25), priority=rng.randint(0, 2))
            # Planned a little before; the last step is over by then or still runs.
            made.arrivals[key] = max(0.0, clock - rng.uniform(0, 0.9))
            made.emissions[key], made.prompt_lens[key], index = [], length, index + 1
        scheduled = lab.scheduler.schedule()
        if scheduled.num_scheduled_tokens or scheduled.preempted_request_ids:
            events = _name_preemptions(lab.manager.take_events(), frozenset(scheduled.preempted_request_ids))
            names = {"waiting": "queued", "preempted": "preempted", "running": "stalled"}
            states = {key: names[request.status] for key, request in lab.scheduler.requests.items()}
            made.states.append(states | dict(scheduled.kinds))
            in_flight.append((scheduled, events))
            if len(in_flight) <= ahead:
                continue
        clock = complete(clock)
    assert len(made.finishes) == num_requests
    assert all(earlier[2] < later[1] for earlier, later in pairwise(made.times))
    return made
