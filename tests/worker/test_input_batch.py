"""The arrays of each step against lists kept by hand, over random traffic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backend.core.output import NewRequestData, SchedulerOutput
from backend.sample.metadata import SamplingMetadata
from backend.sampling_params import SamplingParams
from backend.worker.input_batch import SAMPLED_TOKEN, InputBatch, RepeatInput, StepInput
from tests.worker.traffic import Job, Known, Traffic, batch_order, step_of


def check(step: StepInput, output: SchedulerOutput, jobs: list[Job], block_size: int, num_blocks: int) -> None:
    """Every array, token by token; of rows only that a request's tokens share one (see `Rows`)."""
    token_ids, positions, slots, starts, lens, sampled, last_rows = [], [], [], [0], [], [], []
    for job in jobs:
        size = output.num_scheduled_tokens[job.request_id]
        for position in range(job.computed, job.computed + size):
            token_ids.append(job.token_ids[position] if position < job.num_told else SAMPLED_TOKEN)
            positions.append(position)
            slots.append(job.blocks[position // block_size] * block_size + position % block_size)
        assert len(set(step.token_rows[starts[-1] :][:size].tolist())) == 1
        starts.append(len(token_ids))
        lens.append(job.computed + size)
        if lens[-1] == len(job.token_ids):
            sampled.append(job)
            last_rows.append(len(token_ids) - 1)

    for array, expected, dtype in [
        (step.token_ids, token_ids, np.int64),
        (step.positions, positions, np.int64),
        (step.slot_mapping, slots, np.int64),
        (step.query_start_loc, starts, np.int32),
        (step.seq_lens, lens, np.int32),
        (step.logits_indices, last_rows, np.int64),
        (step.sampled_reqs, [jobs.index(job) for job in sampled], np.int64),
        (step.sampled_rows, step.token_rows[last_rows].tolist(), np.int64),
    ]:
        assert (array.tolist(), array.dtype) == (expected, dtype)
    assert (step.token_rows.shape, step.token_rows.dtype) == ((len(token_ids),), np.int64)
    table = step.block_table
    assert table.dtype == np.int32
    assert table.shape == (len(jobs), max(-(-length // block_size) for length in lens))
    for row, length, job in zip(table.tolist(), lens, jobs, strict=True):
        used = -(-length // block_size)
        assert row[:used] == job.blocks[:used]
        assert all(0 <= block <= num_blocks for block in row[used:]), "attention may read any entry"

    sizes = list(output.num_scheduled_tokens.values())
    assert (step.num_reqs, step.num_decodes) == (len(jobs), sizes.count(1))
    assert np.diff(step.query_start_loc)[: step.num_decodes].tolist() == [1] * step.num_decodes
    assert step.sampled_request_ids == [job.request_id for job in sampled]
    check_sampling(step.sampling, sampled)


def check_sampling(sampling: SamplingMetadata | None, sampled: list[Job]) -> None:
    banned = [job.banned if job.num_output_tokens < job.params.min_tokens else () for job in sampled]
    if all(job.params.temperature == 0 and not ids for job, ids in zip(sampled, banned, strict=True)):
        assert sampling is None
        return
    assert sampling is not None
    assert sampling.params == [job.params for job in sampled]
    assert sampling.positions == [job.num_output_tokens for job in sampled]
    assert sampling.banned_token_ids == banned


class Device:
    """The device's side: the last token sampled in each row, and the block table of the last step.

    Whose row it is follows from the steps alone.
    """

    def __init__(self, max_num_reqs: int, max_num_blocks: int) -> None:
        self._tokens = np.full(max_num_reqs, -7)
        self._owners: dict[int, str] = {}
        self._table = np.zeros((max_num_reqs, max_num_blocks), dtype=np.int32)

    def forget(self, output: SchedulerOutput) -> None:
        gone = {*output.finished_request_ids, *output.preempted_request_ids}
        self._owners = {row: owner for row, owner in self._owners.items() if owner not in gone}

    def check(self, step: StepInput, output: SchedulerOutput, jobs: list[Job]) -> None:
        """Rows are kept for as long as a request is known, and hold the tokens that the host does not tell."""
        for job, start in zip(jobs, step.query_start_loc.tolist(), strict=False):
            row = int(step.token_rows[start])
            known_row = [mine for mine, owner in self._owners.items() if owner == job.request_id]
            assert known_row in ([], [row])
            assert self._owners.setdefault(row, job.request_id) == job.request_id
        resolved = np.where(step.token_ids >= 0, step.token_ids, self._tokens[step.token_rows])
        wanted = [
            job.token_ids[position]
            for job in jobs
            for position in range(job.computed, job.computed + output.num_scheduled_tokens[job.request_id])
        ]
        assert resolved.tolist() == wanted
        self._table[: len(jobs), : step.block_table.shape[1]] = step.block_table

    def check_repeat(self, step: RepeatInput, jobs: list[Job], block_size: int) -> None:
        """The same rows again; with the new blocks, the table that is there already serves the new lengths."""
        assert step.request_ids == [job.request_id for job in jobs]
        assert [self._owners[row] for row in step.rows.tolist()] == step.request_ids
        assert self._tokens[step.rows].tolist() == [job.token_ids[job.computed] for job in jobs]
        for place, column, block_id in step.new_blocks:
            self._table[place, column] = block_id
        for row, job in zip(self._table, jobs, strict=False):
            used = job.computed // block_size + 1
            assert row[:used].tolist() == job.blocks[:used]
        check_sampling(step.sampling, jobs)

    def record(self, request_ids: list[str], rows: np.ndarray, sampled: dict[str, int]) -> None:
        assert set(request_ids) == set(sampled)
        self._tokens[rows] = [sampled[request_id] for request_id in request_ids]


def is_repeat(output: SchedulerOutput, jobs: list[Job], last: tuple[StepInput, SchedulerOutput] | None) -> bool:
    """Whether a step is the one before it, a sampled token further."""
    if last is None or output.new_requests or output.finished_request_ids or output.preempted_request_ids:
        return False
    step, before = last
    ran_on_device = len(step.sampled_reqs) == step.num_reqs and set(step.token_ids.tolist()) == {SAMPLED_TOKEN}
    return ran_on_device and list(output.num_scheduled_tokens.items()) == list(before.num_scheduled_tokens.items())


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
        max_seq_len = batch.repeats(output)
        assert (max_seq_len is not None) == is_repeat(output, jobs, last)
        if max_seq_len is not None and repeating:
            assert max_seq_len == max(job.computed + 1 for job in jobs)
            repeat = batch.build_repeat(output)
            device.check_repeat(repeat, jobs, block_size)
            device.record(repeat.request_ids, repeat.rows, traffic.carry_out(output))
            kinds.add("new blocks" if repeat.new_blocks else "same blocks")
            num_repeats += 1
            continue
        batch.update(output)
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


def new(request_id: str, token_ids: list[int], blocks: list[int], **changes: object) -> NewRequestData:
    data = NewRequestData(request_id, token_ids, len(token_ids), SamplingParams(), (), [blocks], 0)
    return replace(data, **changes)  # type: ignore[arg-type]


def run(batch: InputBatch, output: SchedulerOutput) -> StepInput:
    batch.update(output)
    return batch.build(output)


def test_a_worked_example() -> None:
    """Blocks of 4: a whole prompt of 6 in blocks 9 and 2, beside the first 3 of 5 in block 5."""
    batch = InputBatch(4, 16, 4)
    step = run(
        batch,
        step_of(
            {"a": 6, "b": 3},
            new=(new("a", [10, 11, 12, 13, 14, 15], [9, 2]), new("b", [20, 21, 22, 23, 24], [5])),
        ),
    )
    assert step.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 20, 21, 22]
    row_of_a, row_of_b = step.token_rows[0], step.token_rows[6]
    assert row_of_a != row_of_b
    assert step.token_rows.tolist() == [row_of_a] * 6 + [row_of_b] * 3
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert step.slot_mapping.tolist() == [36, 37, 38, 39, 8, 9, 20, 21, 22]
    assert step.query_start_loc.tolist() == [0, 6, 9]
    assert step.seq_lens.tolist() == [6, 3]
    assert step.block_table[:, 0].tolist() == [9, 5]
    assert step.block_table[0, 1] == 2
    assert (step.num_reqs, step.num_decodes, step.sampling) == (2, 0, None)
    assert (step.sampled_request_ids, step.logits_indices.tolist()) == (["a"], [5])
    assert (step.sampled_reqs.tolist(), step.sampled_rows.tolist()) == ([0], [row_of_a])

    known = (Known("b", [[7]], 3), Known("a", [[]], 6))
    step = run(batch, step_of({"a": 1, "b": 2}, known=known))
    assert step.token_ids.tolist() == [SAMPLED_TOKEN, 23, 24]
    assert step.token_rows.tolist() == [row_of_a, row_of_b, row_of_b]
    assert step.positions.tolist() == [6, 3, 4]
    assert step.slot_mapping.tolist() == [10, 23, 28]
    assert (step.num_decodes, step.sampled_request_ids, step.logits_indices.tolist()) == (1, ["a", "b"], [0, 2])


def test_a_step_may_be_built_before_the_last_one_is_carried_out() -> None:
    """What a step samples counts as known at once: nobody tells the batch which token it was."""
    batch = InputBatch(1, 16, 4)
    run(batch, step_of({"a": 3}, new=(new("a", [1, 2, 3], [1, 2]),)))
    for length in (4, 5, 6):
        step = run(batch, step_of({"a": 1}, known=(Known("a", [[]], length - 1),)))
        assert (step.token_ids.tolist(), step.positions.tolist()) == ([SAMPLED_TOKEN], [length - 1])
        assert (step.seq_lens.tolist(), step.sampled_request_ids) == ([length], ["a"])


def test_a_repeat_goes_on_where_the_last_step_ended() -> None:
    """Blocks of 4: the longer request needs a new one. Afterwards a step is built from the same books."""
    batch = InputBatch(3, 16, 4)
    run(batch, step_of({"a": 2, "b": 3}, new=(new("a", [1] * 2, [1]), new("b", [2] * 3, [2]))))
    step = run(batch, step_of({"a": 1, "b": 1}, known=(Known("a", [[]], 2), Known("b", [[]], 3))))
    again = step_of({"a": 1, "b": 1}, known=(Known("a", [[]], 3), Known("b", [[7]], 4)))
    assert batch.repeats(again) == 5
    repeat = batch.build_repeat(again)
    assert step.sampled_request_ids == ["b", "a"], "the longer one comes first"
    assert (repeat.request_ids, repeat.rows.tolist()) == (["b", "a"], step.sampled_rows.tolist())
    assert (repeat.new_blocks, repeat.sampling) == ([(0, 1, 7)], None)
    step = run(batch, step_of({"b": 1, "a": 1}, known=(Known("a", [[9]], 4), Known("b", [[]], 5))))
    assert (step.seq_lens.tolist(), step.positions.tolist()) == ([6, 5], [5, 4])
    assert step.block_table.tolist() == [[2, 7], [1, 9]]
    assert step.sampled_request_ids == ["b", "a"]


def test_what_is_no_repeat() -> None:
    batch = InputBatch(3, 32, 4)
    assert batch.repeats(step_of({"a": 1}, new=(new("a", [1], [1]),))) is None
    both = (new("a", [1] * 2, [1, 2, 3]), new("b", [2] * 3, [4, 5, 6]))
    run(batch, step_of({"a": 2, "b": 3}, new=both))
    first = step_of({"a": 1, "b": 1}, known=(Known("a", [[]], 2), Known("b", [[]], 3)))
    assert batch.repeats(first) is None, "prompts came before"
    run(batch, first)
    known = (Known("a", [[]], 3), Known("b", [[]], 4))
    assert batch.repeats(step_of({"a": 1, "b": 1}, known=known)) == 5
    assert batch.repeats(step_of({"b": 1, "a": 1}, known=known)) is None, "another order"
    assert batch.repeats(step_of({"a": 1}, known=known)) is None, "one is left out"
    assert batch.repeats(step_of({"a": 1, "b": 2}, known=known)) is None
    assert batch.repeats(step_of({"a": 1, "b": 1}, known=known, finished=("c",))) is None
    assert batch.repeats(step_of({"a": 1, "b": 1}, known=known, preempted=("c",))) is None
    assert batch.repeats(step_of({})) is None
    run(batch, step_of({"a": 1}, known=known))
    assert batch.repeats(step_of({"a": 1, "b": 1}, known=known)) is None


def test_bans_and_positions_go_on_where_a_preempted_request_left_off() -> None:
    """min_tokens counts output tokens, which a resumed request brings along in its `token_ids`."""
    batch = InputBatch(2, 16, 4)
    params = SamplingParams(min_tokens=3, temperature=1.0)
    first = new("a", [1, 2], [1], sampling_params=params, banned_token_ids=(9,))
    outputs: list[tuple[int, tuple[int, ...]]] = []

    def take(output: SchedulerOutput) -> None:
        sampling = run(batch, output).sampling
        assert sampling is not None
        outputs.append((sampling.positions[0], sampling.banned_token_ids[0]))

    take(step_of({"a": 2}, new=(first,)))
    take(step_of({"a": 1}, known=(Known("a", [[]], 2),)))
    batch.update(step_of({}, preempted=("a",)))
    resumed = replace(first, token_ids=[1, 2, 50, 51], block_ids=[[3]])
    take(step_of({"a": 4}, new=(resumed,)))
    take(step_of({"a": 1}, known=(Known("a", [[2]], 4),)))
    assert outputs == [(0, (9,)), (1, (9,)), (2, (9,)), (3, ())]


def test_greedy_requests_need_no_sampling_once_their_bans_are_over() -> None:
    """But one that bans, or that draws, makes the whole batch need it."""
    batch = InputBatch(3, 16, 4)
    bans = new("bans", [1], [1], sampling_params=SamplingParams(min_tokens=2), banned_token_ids=(9,))
    unbanned = new("unbanned", [1], [2], sampling_params=SamplingParams(min_tokens=2))
    draws = new("draws", [1, 2, 3], [3], sampling_params=SamplingParams(temperature=0.5))
    step = run(batch, step_of({"bans": 1, "unbanned": 1, "draws": 2}, new=(bans, unbanned, draws)))
    assert step.sampling is not None
    assert step.sampling.banned_token_ids == [(9,), ()]  # the third is not sampled yet

    def go_on(num_computed: int, **scheduled: int) -> StepInput:
        known = [Known(name, [[]], 2 if name == "draws" else num_computed) for name in scheduled]
        return run(batch, step_of(scheduled, known=known))

    assert go_on(1, unbanned=1).sampling is None
    assert go_on(1, bans=1).sampling is not None
    assert go_on(2, bans=1, unbanned=1).sampling is None
    mixed = go_on(3, bans=1, draws=1).sampling
    assert mixed is not None
    assert (mixed.positions, mixed.banned_token_ids) == ([3, 0], [(), ()])


def test_a_part_of_a_resumed_request_is_not_sampled() -> None:
    """The chunk ends with the prompt, but output tokens are still to be computed again."""
    batch = InputBatch(1, 16, 4)
    params = SamplingParams(temperature=1.0)
    resumed = new("a", [1, 2, 50, 51], [3], num_prompt_tokens=2, sampling_params=params)
    step = run(batch, step_of({"a": 2}, new=(resumed,)))
    assert step.sampled_request_ids == []
    assert step.logits_indices.shape == step.sampled_rows.shape == (0,)
    assert step.sampling is None
    step = run(batch, step_of({"a": 2}, known=(Known("a", [[]], 2),)))
    assert step.sampling is not None
    assert (step.token_ids.tolist(), step.sampled_request_ids, step.sampling.positions) == ([50, 51], ["a"], [2])


def test_an_id_that_comes_back_at_once_has_nothing_of_its_last_owner() -> None:
    """One row: the end of the last owner and the new request arrive in one message."""
    batch = InputBatch(1, 12, 4)
    run(batch, step_of({"a": 12}, new=(new("a", list(range(12)), [1, 2, 3]),)))
    step = run(batch, step_of({"a": 2}, new=(new("a", [70, 71], [3]),), finished=("a",)))
    assert step.token_ids.tolist() == [70, 71]
    assert step.block_table.tolist() == [[3]]
    assert step.slot_mapping.tolist() == [12, 13]
    assert (step.sampled_request_ids, step.token_rows.tolist()) == (["a"], [0, 0])


def test_an_end_that_is_told_twice_or_of_nobody_gives_no_row_away() -> None:
    batch = InputBatch(2, 4, 4)
    batch.update(step_of({}, new=(new("a", [1], [1]),)))
    batch.update(step_of({}, finished=("a", "a", "nobody"), preempted=("a",)))
    step = run(batch, step_of({"b": 1, "c": 1}, new=(new("b", [1], [1]), new("c", [1], [2]))))
    assert step.block_table.tolist() == [[1], [2]]
    assert sorted(step.token_rows.tolist()) == [0, 1]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_request_may_have_the_full_length(block_size: int) -> None:
    """17 tokens: no multiple of the larger block sizes."""
    batch = InputBatch(1, 17, block_size)
    blocks = list(range(1, -(-17 // block_size) + 1))
    step = run(batch, step_of({"a": 17}, new=(new("a", list(range(17)), blocks),)))
    assert step.block_table.tolist() == [blocks]
    assert step.slot_mapping.tolist() == [block_size + position for position in range(17)]


def test_later_steps_leave_an_earlier_one_as_it_was() -> None:
    """The device may still be reading it."""
    batch = InputBatch(2, 16, 4)
    step = run(batch, step_of({"a": 4, "b": 4}, new=(new("a", [1] * 8, [1, 2]), new("b", [2] * 8, [3, 4]))))
    before = [array.copy() for array in (step.block_table, step.token_ids, step.sampled_rows, step.token_rows)]
    run(batch, step_of({"c": 3}, new=(new("c", [5] * 3, [7, 8]),), finished=("a",)))
    for array, copy in zip((step.block_table, step.token_ids, step.sampled_rows, step.token_rows), before, strict=True):
        assert np.array_equal(array, copy)
