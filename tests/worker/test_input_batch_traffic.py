"""The arrays of each step against lists kept by hand, over random traffic."""

from __future__ import annotations

import pytest

from backend.worker.input_batch import InputBatch
from tests.worker.step_oracle import Device, check, is_repeat
from tests.worker.traffic import Traffic, batch_order


@pytest.mark.parametrize("repeating", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_step_of_random_traffic_is_what_the_lists_say(block_size: int, seed: int, repeating: bool) -> None:
    traffic = Traffic(seed, block_size)
    batch = InputBatch(traffic.max_num_reqs, traffic.max_model_len, block_size)
    device = Device(traffic.max_num_reqs, traffic.blocks_each)
    kinds, last, num_repeats = set(), None, 0
    for _ in range(200):
        output, jobs = traffic.schedule()
        jobs = batch_order(output, jobs)
        batch.update(output)
        num_blocks = batch.repeats(output)
        assert (num_blocks is not None) == is_repeat(output, jobs, last)
        if num_blocks is not None and repeating:
            assert num_blocks == max(job.computed // block_size + 1 for job in jobs)
            repeat = batch.build_repeat(output)
            device.check_repeat(repeat, jobs, block_size)
            device.record(repeat.request_ids, repeat.rows, traffic.carry_out(output))
            kinds.add("new blocks" if repeat.new_blocks else "same blocks")
            num_repeats += 1
            continue
        device.forget(output)
        if jobs:
            step = batch.build(output)
            check(step, output, jobs, block_size, traffic.num_blocks)
            device.check(step, output, jobs)
            device.record(step.sampled_request_ids, step.sampled_rows, traffic.carry_out(output))
            kinds |= {step.sampling is None, "device" if (step.token_ids < 0).any() else "host"}
            last = (step, output)
        else:
            assert traffic.carry_out(output) == {}
    assert traffic.count > 20, "rows were meant to be used again and again"
    assert traffic.seen == {"preempted", "resumed", "chunk", "single", "prompt or recompute", "ended"}
    assert kinds >= {True, False, "device", "host"}
    assert not repeating or num_repeats > 5
    assert not repeating or block_size == 1 or kinds >= {"new blocks", "same blocks"}
