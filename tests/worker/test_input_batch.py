"""The tensors of each step against lists kept by hand, over random traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backend.core.output import CachedRequestData, NewRequestData, SchedulerOutput
from backend.sampling_params import SamplingParams
from backend.worker.input_batch import InputBatch, StepInput
from tests.worker.traffic import Job, Traffic

CPU = torch.device("cpu")


def check(step: StepInput, output: SchedulerOutput, jobs: list[Job], block_size: int, num_blocks: int) -> None:
    """Every tensor, token by token."""
    token_ids, positions, slots, starts, lens, sampled, last_rows = [], [], [], [0], [], [], []
    for job in jobs:
        size = output.num_scheduled_tokens[job.request_id]
        for position in range(job.computed, job.computed + size):
            token_ids.append(job.token_ids[position])
            positions.append(position)
            slots.append(job.blocks[position // block_size] * block_size + position % block_size)
        starts.append(len(token_ids))
        lens.append(job.computed + size)
        if lens[-1] == len(job.token_ids):
            sampled.append(job)
            last_rows.append(len(token_ids) - 1)

    metadata, sampling = step.metadata, step.sampling
    for tensor, expected, dtype in [
        (step.token_ids, token_ids, torch.int64),
        (metadata.positions, positions, torch.int64),
        (metadata.slot_mapping, slots, torch.int64),
        (metadata.query_start_loc, starts, torch.int32),
        (metadata.seq_lens, lens, torch.int32),
        (step.logits_indices, last_rows, torch.int64),
    ]:
        assert tensor.tolist() == expected
        assert (tensor.dtype, tensor.is_contiguous()) == (dtype, True)
    table = metadata.block_table
    assert (table.dtype, table.is_contiguous()) == (torch.int32, True)
    assert table.shape == (len(jobs), max(-(-length // block_size) for length in lens))
    for row, length, job in zip(table.tolist(), lens, jobs, strict=True):
        used = -(-length // block_size)
        assert row[:used] == job.blocks[:used]
        assert all(0 <= block <= num_blocks for block in row[used:]), "attention may read any entry"

    assert step.sampled_request_ids == [job.request_id for job in sampled]
    assert sampling.params == [job.params for job in sampled]
    assert sampling.positions == [job.num_output_tokens for job in sampled]
    for job, banned in zip(sampled, sampling.banned_token_ids, strict=True):
        assert banned == (job.banned if job.num_output_tokens < job.params.min_tokens else ())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_step_of_random_traffic_is_what_the_lists_say(block_size: int, seed: int) -> None:
    traffic = Traffic(seed, block_size)
    batch = InputBatch(traffic.max_num_reqs, traffic.max_model_len, block_size, CPU)
    for _ in range(150):
        output, jobs = traffic.schedule()
        batch.update(output)
        if jobs:
            check(batch.build(output), output, jobs, block_size, traffic.num_blocks)
        traffic.carry_out(output, batch)
    assert traffic.count > 20, "rows were meant to be used again and again"
    assert traffic.seen == {"preempted", "resumed", "chunk", "single", "prompt or recompute", "ended"}


def new(request_id: str, token_ids: list[int], blocks: list[int], **changes: object) -> NewRequestData:
    data = NewRequestData(request_id, token_ids, len(token_ids), SamplingParams(), (), [blocks], 0)
    return replace(data, **changes)  # type: ignore[arg-type]


def step_of(
    num_scheduled_tokens: dict[str, int],
    *,
    new_requests: tuple[NewRequestData, ...] = (),
    cached_requests: tuple[CachedRequestData, ...] = (),
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
) -> SchedulerOutput:
    kinds = dict.fromkeys(num_scheduled_tokens, "prefill")
    return SchedulerOutput(
        step=0,
        new_requests=list(new_requests),
        cached_requests=list(cached_requests),
        num_scheduled_tokens=num_scheduled_tokens,
        kinds=kinds,  # type: ignore[arg-type]
        finished_request_ids=list(finished),
        preempted_request_ids=list(preempted),
    )


def run(batch: InputBatch, output: SchedulerOutput) -> StepInput:
    batch.update(output)
    return batch.build(output)


def test_a_worked_example() -> None:
    """Blocks of 4: a whole prompt of 6 in blocks 9 and 2, beside the first 3 of 5 in block 5."""
    batch = InputBatch(4, 16, 4, CPU)
    step = run(
        batch,
        step_of(
            {"a": 6, "b": 3},
            new_requests=(new("a", [10, 11, 12, 13, 14, 15], [9, 2]), new("b", [20, 21, 22, 23, 24], [5])),
        ),
    )
    assert step.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 20, 21, 22]
    assert step.metadata.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert step.metadata.slot_mapping.tolist() == [36, 37, 38, 39, 8, 9, 20, 21, 22]
    assert step.metadata.query_start_loc.tolist() == [0, 6, 9]
    assert step.metadata.seq_lens.tolist() == [6, 3]
    assert step.metadata.block_table[:, 0].tolist() == [9, 5]
    assert step.metadata.block_table[0, 1] == 2
    assert (step.sampled_request_ids, step.logits_indices.tolist()) == (["a"], [5])

    batch.append("a", 16)
    cached = (CachedRequestData("b", [[7]], 3), CachedRequestData("a", [[]], 6))
    step = run(batch, step_of({"a": 1, "b": 2}, cached_requests=cached))
    assert step.token_ids.tolist() == [16, 23, 24]
    assert step.metadata.positions.tolist() == [6, 3, 4]
    assert step.metadata.slot_mapping.tolist() == [10, 23, 28]
    assert (step.sampled_request_ids, step.logits_indices.tolist()) == (["a", "b"], [0, 2])
    assert step.sampling.positions == [1, 0]


def test_bans_and_positions_go_on_where_a_preempted_request_left_off() -> None:
    """min_tokens counts output tokens, which a resumed request brings along in its `token_ids`."""
    batch = InputBatch(2, 16, 4, CPU)
    params = SamplingParams(min_tokens=3)
    first = new("a", [1, 2], [1], sampling_params=params, banned_token_ids=(9,))
    outputs: list[tuple[int, tuple[int, ...]]] = []

    def take(output: SchedulerOutput, token_id: int) -> None:
        step = run(batch, output)
        outputs.append((step.sampling.positions[0], step.sampling.banned_token_ids[0]))
        batch.append("a", token_id)

    take(step_of({"a": 2}, new_requests=(first,)), 50)
    take(step_of({"a": 1}, cached_requests=(CachedRequestData("a", [[]], 2),)), 51)
    batch.update(step_of({}, preempted=("a",)))
    resumed = replace(first, token_ids=[1, 2, 50, 51], block_ids=[[3]])
    take(step_of({"a": 4}, new_requests=(resumed,)), 52)
    take(step_of({"a": 1}, cached_requests=(CachedRequestData("a", [[2]], 4),)), 53)
    assert outputs == [(0, (9,)), (1, (9,)), (2, (9,)), (3, ())]


def test_a_part_of_a_resumed_request_is_not_sampled() -> None:
    """The chunk ends with the prompt, but output tokens are still to be computed again."""
    batch = InputBatch(1, 16, 4, CPU)
    resumed = new("a", [1, 2, 50, 51], [3], num_prompt_tokens=2)
    step = run(batch, step_of({"a": 2}, new_requests=(resumed,)))
    assert step.sampled_request_ids == []
    assert step.logits_indices.shape == (0,)
    assert (step.sampling.params, step.sampling.positions, step.sampling.banned_token_ids) == ([], [], [])
    step = run(batch, step_of({"a": 2}, cached_requests=(CachedRequestData("a", [[]], 2),)))
    assert (step.sampled_request_ids, step.sampling.positions) == (["a"], [2])


def test_an_id_that_comes_back_at_once_has_nothing_of_its_last_owner() -> None:
    """One row: the end of the last owner and the new request arrive in one message."""
    batch = InputBatch(1, 12, 4, CPU)
    run(batch, step_of({"a": 12}, new_requests=(new("a", list(range(12)), [1, 2, 3]),)))
    step = run(batch, step_of({"a": 2}, new_requests=(new("a", [70, 71], [3]),), finished=("a",)))
    assert step.token_ids.tolist() == [70, 71]
    assert step.metadata.block_table.tolist() == [[3]]
    assert step.metadata.slot_mapping.tolist() == [12, 13]


def test_an_end_that_is_told_twice_or_of_nobody_gives_no_row_away() -> None:
    batch = InputBatch(2, 4, 4, CPU)
    batch.update(step_of({}, new_requests=(new("a", [1], [1]),)))
    batch.update(step_of({}, finished=("a", "a", "nobody"), preempted=("a",)))
    step = run(batch, step_of({"b": 1, "c": 1}, new_requests=(new("b", [1], [1]), new("c", [1], [2]))))
    assert step.metadata.block_table.tolist() == [[1], [2]]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_request_may_have_the_full_length(block_size: int) -> None:
    """17 tokens: no multiple of the larger block sizes."""
    batch = InputBatch(1, 17, block_size, CPU)
    blocks = list(range(1, -(-17 // block_size) + 1))
    step = run(batch, step_of({"a": 17}, new_requests=(new("a", list(range(17)), blocks),)))
    assert step.metadata.block_table.tolist() == [blocks]
    assert step.metadata.slot_mapping.tolist() == [block_size + position for position in range(17)]
