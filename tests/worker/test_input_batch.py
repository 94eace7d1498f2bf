"""Steps by hand: their arrays, what they sample, what repeats, and rows that change hands."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backend.core.output import SchedulerOutput
from backend.sampling_params import SamplingParams
from backend.worker.input_batch import SAMPLED_TOKEN, InputBatch, StepInput
from backend.worker.speculative_batch import SpeculativeInputBatch
from tests.worker.step_oracle import new, run
from tests.worker.traffic import Known, step_of


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
    assert step.slot_mappings[0].tolist() == [36, 37, 38, 39, 8, 9, 20, 21, 22]
    assert step.query_start_loc.tolist() == [0, 6, 9]
    assert step.seq_lens.tolist() == [6, 3]
    assert step.block_tables[0][:, 0].tolist() == [9, 5]
    assert step.block_tables[0][0, 1] == 2
    assert (step.num_reqs, step.num_decodes, step.sampling) == (2, 0, None)
    assert (step.sampled_request_ids, step.logits_indices.tolist()) == (["a"], [5])
    assert (step.sampled_reqs.tolist(), step.sampled_rows.tolist()) == ([0], [row_of_a])

    known = (Known("b", [[7]], 3), Known("a", [[]], 6))
    step = run(batch, step_of({"a": 1, "b": 2}, known=known))
    assert step.token_ids.tolist() == [SAMPLED_TOKEN, 23, 24]
    assert step.token_rows.tolist() == [row_of_a, row_of_b, row_of_b]
    assert step.positions.tolist() == [6, 3, 4]
    assert step.slot_mappings[0].tolist() == [10, 23, 28]
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
    batch.update(again)
    assert batch.repeats(again) == 2, "columns of the table"
    repeat = batch.build_repeat(again)
    assert step.sampled_request_ids == ["b", "a"], "the longer one comes first"
    assert (repeat.request_ids, repeat.rows.tolist()) == (["b", "a"], step.sampled_rows.tolist())
    assert (repeat.new_blocks, repeat.sampling) == ([(0, 0, 1, 7)], None)
    step = run(batch, step_of({"b": 1, "a": 1}, known=(Known("a", [[9]], 4), Known("b", [[]], 5))))
    assert (step.seq_lens.tolist(), step.positions.tolist()) == ([6, 5], [5, 4])
    assert step.block_tables[0].tolist() == [[2, 7], [1, 9]]
    assert step.sampled_request_ids == ["b", "a"]


def test_what_is_no_repeat() -> None:
    batch = InputBatch(3, 32, 4)

    def repeats(num_tokens: dict[str, int], **others: Any) -> int | None:
        """A copy of the batch, told of such a step."""
        told, scheduled = deepcopy(batch), step_of(num_tokens, **others)
        told.update(scheduled)
        return told.repeats(scheduled)

    assert repeats({"a": 1}, new=(new("a", [1], [1]),)) is None
    both = (new("a", [1] * 2, [1, 2, 3]), new("b", [2] * 3, [4, 5, 6]))
    run(batch, step_of({"a": 2, "b": 3}, new=both))
    first = step_of({"a": 1, "b": 1}, known=(Known("a", [[]], 2), Known("b", [[]], 3)))
    assert batch.repeats(first) is None, "prompts came before"
    run(batch, first)
    known = (Known("a", [[]], 3), Known("b", [[]], 4))
    assert repeats({"a": 1, "b": 1}, known=known) == 2
    assert repeats({"b": 1, "a": 1}, known=known) is None, "another order"
    assert repeats({"a": 1}, known=known) is None, "one is left out"
    assert repeats({"a": 1, "b": 2}, known=known) is None
    assert repeats({"a": 1, "b": 1}, known=known, finished=("c",)) is None
    assert repeats({"a": 1, "b": 1}, known=known, preempted=("c",)) is None
    assert repeats({}) is None
    run(batch, step_of({"a": 1}, known=known))
    assert repeats({"a": 1, "b": 1}, known=known) is None
    assert repeats({"a": 1}, known=(Known("a", [[]], 4),)) == 2
    assert repeats({"a": 1}, known=(Known("a", [[]], 4), Known("b", [[9]], 5))) is None, (
        "blocks of one that is not in it"
    )


def test_a_repeat_reaches_as_far_as_blocks_ahead_of_its_tokens() -> None:
    """Those that drafts may need, of which some are given back and come again: the table has what holds now."""
    batch = SpeculativeInputBatch(2, 64, 4)
    run(batch, step_of({"a": 2}, new=(new("a", [1] * 2, [1]),)))
    run(batch, step_of({"a": 1}, known=(Known("a", [[]], 2),)))
    drafted = replace(step_of({"a": 1}, known=(Known("a", [[5, 6, 7]], 3),)), num_draft_tokens={"a": 9})
    batch.update(drafted)
    assert batch.repeats(drafted) == 4
    assert batch.build_repeat(drafted).new_blocks == [(0, 0, 1, 5), (0, 0, 2, 6), (0, 0, 3, 7)]
    shorter = replace(step_of({"a": 1}, known=(Known("a", [[9]], 4),)), num_kept_blocks={"a": 2})
    batch.update(shorter)
    assert batch.repeats(shorter) == 3
    assert batch.build_repeat(shorter).new_blocks == [(0, 0, 2, 9)]
    assert batch.blocks_of("a") == [1, 5, 9]


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
    assert step.block_tables[0].tolist() == [[3]]
    assert step.slot_mappings[0].tolist() == [12, 13]
    assert (step.sampled_request_ids, step.token_rows.tolist()) == (["a"], [0, 0])


def test_an_end_that_is_told_twice_or_of_nobody_gives_no_row_away() -> None:
    batch = InputBatch(2, 4, 4)
    batch.update(step_of({}, new=(new("a", [1], [1]),)))
    batch.update(step_of({}, finished=("a", "a", "nobody"), preempted=("a",)))
    step = run(batch, step_of({"b": 1, "c": 1}, new=(new("b", [1], [1]), new("c", [1], [2]))))
    assert step.block_tables[0].tolist() == [[1], [2]]
    assert sorted(step.token_rows.tolist()) == [0, 1]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_request_may_have_the_full_length(block_size: int) -> None:
    """17 tokens: no multiple of the larger block sizes."""
    batch = InputBatch(1, 17, block_size)
    blocks = list(range(1, -(-17 // block_size) + 1))
    step = run(batch, step_of({"a": 17}, new=(new("a", list(range(17)), blocks),)))
    assert step.block_tables[0].tolist() == [blocks]
    assert step.slot_mappings[0].tolist() == [block_size + position for position in range(17)]


def test_later_steps_leave_an_earlier_one_as_it_was() -> None:
    """The device may still be reading it."""
    batch = InputBatch(2, 16, 4)
    step = run(batch, step_of({"a": 4, "b": 4}, new=(new("a", [1] * 8, [1, 2]), new("b", [2] * 8, [3, 4]))))
    before = [array.copy() for array in (step.block_tables, step.token_ids, step.sampled_rows, step.token_rows)]
    run(batch, step_of({"c": 3}, new=(new("c", [5] * 3, [7, 8]),), finished=("a",)))
    for array, copy in zip(
        (step.block_tables, step.token_ids, step.sampled_rows, step.token_rows), before, strict=True
    ):
        assert np.array_equal(array, copy)
