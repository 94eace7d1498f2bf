"""Requests and steps of an input batch by hand, and what each step's arrays should be by lists kept beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from backend.core.output import NewRequestData, SchedulerOutput
from backend.sample.metadata import SamplingMetadata
from backend.sampling_params import SamplingParams
from backend.worker.input_batch import SAMPLED_TOKEN, InputBatch, RepeatInput, StepInput
from tests.worker.traffic import Job


def new(request_id: str, token_ids: list[int], blocks: list[int], **changes: object) -> NewRequestData:
    data = NewRequestData(request_id, token_ids, len(token_ids), SamplingParams(), (), [blocks], 0)
    return replace(data, **changes)  # type: ignore[arg-type]


def run(batch: InputBatch, output: SchedulerOutput) -> StepInput:
    batch.update(output)
    return batch.build(output)


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
        (step.slot_mappings[0], slots, np.int64),
        (step.query_start_loc, starts, np.int32),
        (step.seq_lens, lens, np.int32),
        (step.logits_indices, last_rows, np.int64),
        (step.sampled_reqs, [jobs.index(job) for job in sampled], np.int64),
        (step.sampled_rows, step.token_rows[last_rows].tolist(), np.int64),
    ]:
        assert (array.tolist(), array.dtype) == (expected, dtype)
    assert (step.token_rows.shape, step.token_rows.dtype) == ((len(token_ids),), np.int64)
    table = step.block_tables[0]
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
        self._table[: len(jobs), : step.block_tables[0].shape[1]] = step.block_tables[0]

    def check_repeat(self, step: RepeatInput, jobs: list[Job], block_size: int) -> None:
        """The same rows again; with the new blocks, the table that is there already serves the new lengths."""
        assert step.request_ids == [job.request_id for job in jobs]
        assert [self._owners[row] for row in step.rows.tolist()] == step.request_ids
        assert self._tokens[step.rows].tolist() == [job.token_ids[job.computed] for job in jobs]
        for group, place, column, block_id in step.new_blocks:
            assert group == 0
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
