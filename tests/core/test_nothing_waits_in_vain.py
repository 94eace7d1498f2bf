"""A request waits only for a slot, for blocks or for budget that is not there (sgl-project/sglang#32549, #35537).

A flag that says the batch is full, kept for a step too long, leaves a free slot unused while somebody waits.
"""

from __future__ import annotations

import random

import pytest

from backend.core.output import SchedulerOutput
from tests.core.paged_machine import Lab, generate


def watch(lab: Lab) -> list[str]:
    """Check every step as it is scheduled; what each one's first in the queue waited for."""
    schedule, reasons = lab.scheduler.schedule, []

    def checked() -> SchedulerOutput:
        scheduled = schedule()
        scheduler, manager = lab.scheduler, lab.manager
        if not scheduler.waiting or scheduled.preempted_request_ids:
            return scheduled
        first = next(iter(scheduler.waiting))
        if first.num_placeholder_tokens:
            return scheduled  # preempted with a token on its way, without which it cannot begin again
        owed = sum(manager.blocks_needed(r.num_tokens + 1) - manager.num_blocks_of(r) for r in scheduler.running)
        room = manager.pool.num_free_blocks + manager.pool.num_evictable_blocks
        if len(scheduler.running) == lab.max_num_seqs:
            reasons.append("slot")
        elif scheduled.total_num_scheduled_tokens == lab.max_num_batched_tokens:
            reasons.append("budget")
        else:
            assert room < owed + manager.blocks_needed(first.num_tokens), f"{first.request_id} waits for nothing"
            reasons.append("blocks")
        return scheduled

    lab.scheduler.schedule = checked
    return reasons


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_under_random_traffic(policy: str, ahead: int, prefix_caching: bool) -> None:
    reasons: set[str] = set()
    for seed in range(4):
        rng = random.Random(seed)
        lab = Lab(
            num_blocks=30,
            block_size=4,
            max_num_seqs=5,
            max_num_batched_tokens=rng.choice([16, 48]),
            policy=policy,
            ahead=ahead,
            prefix_caching=prefix_caching,
        )
        told = watch(lab)
        expected = {}
        for index in range(60):
            prompt = [7] * rng.choice((0, 8)) + rng.choices(range(100), k=rng.randint(1, 30))
            count = rng.choice((1, 4, 12))
            lab.add(str(index), prompt, count, priority=rng.randrange(3))
            expected[str(index)] = generate(prompt, count)
            for _ in range(rng.choice((0, 1, 4))):
                if lab.scheduler.has_unfinished_requests():
                    lab.step()
            if rng.random() < 0.1 and str(index) in lab.scheduler.requests:
                lab.abort(str(index))
                del expected[str(index)]
        tokens = lab.run()
        assert {key: tokens[key] for key in expected} == expected
        reasons |= set(told)
    assert reasons == {"slot", "budget", "blocks"}, "each of them was meant to happen"
