"""Long prompts that keep coming do not hold up decodes, and one that is very long does not hold up short ones.

Where prompts always come first, running requests get no token for as long as there are any (sgl-project/sglang#32549,
vllm-project/vllm#10774), and a flag that says the batch is full may outlive the step in which it was true
(sgl-project/sglang#35537). Time is counted in steps. Of `prefill_first`, which is meant to starve decodes, see
`test_policies`.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.core.paged_machine import VOCAB, Lab, generate

BUDGET = 512


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCAB), k=length)


@pytest.mark.parametrize(("policy", "ahead"), [("fcfs", 0), ("priority", 1)])
def test_decodes_get_a_token_in_each_of_300_steps_in_which_a_prompt_of_3000_arrives(policy: str, ahead: int) -> None:
    """With a budget above their number none of them ever waits; what they leave goes to the prompts, to the last token."""
    lab = Lab(
        policy=policy,
        ahead=ahead,
        num_blocks=4000,
        block_size=16,
        max_num_seqs=300,
        max_num_batched_tokens=BUDGET,
        max_model_len=8192,
    )
    decodes = {f"d{index}": prompt_of(20, index) for index in range(4)}
    for key, prompt in decodes.items():
        lab.add(key, prompt, max_tokens=310)
    lab.step()
    for index in range(300):
        lab.add(f"p{index}", prompt_of(3000, index), max_tokens=1)
        lab.step()
        assert lab.steps[-1].total_num_scheduled_tokens == BUDGET, "the budget is used up while prompts wait"
    for key in decodes:
        ran = [number for number, step in enumerate(lab.steps) if key in step.num_scheduled_tokens]
        assert max(later - earlier for earlier, later in pairwise(ran)) == 1
        assert len(ran) == len(lab.steps) == 301
    done = [key for key in lab.finished if key.startswith("p")]
    assert len(done) >= 300 * (BUDGET - 4) // 3000 - 25, "prompts move on too: all but those under way are over"
    for index in range(300):
        if f"p{index}" not in lab.finished:
            lab.abort(f"p{index}")
    tokens = lab.run()
    assert {key: tokens[key] for key in decodes} == {key: generate(prompt, 310) for key, prompt in decodes.items()}
    assert all(tokens[key] == generate(prompt_of(3000, int(key[1:])), 1) for key in done)


@pytest.mark.parametrize("every", [0, 1, 3], ids=["at once", "one each step", "one each third step"])
def test_short_prompts_have_their_token_while_one_of_20000_is_under_way(every: int) -> None:
    """In the step that comes after their arrival, and what they leave of the budget is the long one's."""
    lab = Lab(num_blocks=4000, block_size=16, max_num_seqs=16, max_num_batched_tokens=BUDGET, max_model_len=32_000)
    lab.add("long", prompt_of(20_000), max_tokens=1)
    arrived, first_token = {}, {}
    while "long" not in lab.finished:
        while len(arrived) < 10 and len(lab.steps) >= every * len(arrived):
            key = f"s{len(arrived)}"
            lab.add(key, prompt_of(20, len(arrived)), max_tokens=5)
            arrived[key] = len(lab.steps)
        for output in lab.step():
            first_token.setdefault(output.request_id, len(lab.steps))
    assert list(first_token)[-1] == "long"
    assert {first_token[key] - arrived[key] for key in arrived} == {1}
    assert len(arrived) == 10
    short_tokens = 10 * (20 + 4)
    assert len(lab.steps) == -(-(20_000 + short_tokens) // BUDGET)
    tokens = lab.run()
    for index in range(10):
        assert tokens[f"s{index}"] == generate(prompt_of(20, index), 5)


@pytest.mark.parametrize("num_blocks", [1000, 400])
def test_with_four_slots_four_run_as_soon_as_a_slot_and_blocks_are_free(num_blocks: int) -> None:
    """Requests of 3,000 tokens beside short ones; in the smaller pool two long ones are all that fit."""
    lab = Lab(num_blocks=num_blocks, block_size=16, max_num_seqs=4, max_num_batched_tokens=BUDGET, max_model_len=4096)
    rng, running = random.Random(6), list[int]()
    asked = {str(index): (rng.choice((20, 20, 3000)), rng.randint(1, 30)) for index in range(60)}
    for key, (length, max_tokens) in asked.items():
        lab.add(key, prompt_of(length, int(key)), max_tokens)
    schedule = lab.scheduler.schedule

    def checked() -> object:
        scheduled = schedule()
        scheduler, manager = lab.scheduler, lab.manager
        if scheduler.waiting:
            running.append(len(scheduler.running))
        if scheduler.waiting and len(scheduler.running) < 4:
            owed = sum(manager.blocks_needed(r.num_tokens + 1) - manager.num_blocks_of(r) for r in scheduler.running)
            room = manager.pool.num_free_blocks - owed
            assert room < manager.blocks_needed(scheduler.waiting[0].num_tokens), "a slot and blocks are free"
        return scheduled

    lab.scheduler.schedule = checked  # type: ignore[method-assign,assignment]
    assert lab.run() == {key: generate(prompt_of(size, int(key)), count) for key, (size, count) in asked.items()}
    # While others wait. In the larger pool blocks are never short.
    assert max(running) == 4
    assert (min(running) < 4) == (num_blocks == 400)
