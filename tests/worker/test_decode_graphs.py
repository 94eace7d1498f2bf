"""Decode steps replayed from CUDA graphs against the same steps launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backend.core.output import NewRequestData, SchedulerOutput
from backend.sample.metadata import SamplingMetadata, SamplingTensors
from backend.sampling_params import SamplingParams
from backend.worker.input_batch import InputBatch
from kernels.reference.sample_tokens import sample_tokens
from tests.worker.graph_engine import (
    BLOCK_SIZE,
    CONFIG,
    DEVICE,
    MAX_MODEL_LEN,
    MAX_NUM_REQS,
    NUM_BLOCKS,
    SHORT_CONTEXT,
    Engine,
    check_caches,
    make_engine,
    same,
)
from tests.worker.traffic import Known, step_of

BATCH_SIZES = list(range(1, MAX_NUM_REQS + 1))


@pytest.fixture(scope="module", params=[False, True], ids=["by size", "batch invariant"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield make_engine(request.param, monkeypatch)


class Requests:
    """Requests that have been computed but for their last token, and go on by one token a step."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        self.lengths = dict(zip([f"r{index}" for index in range(len(lengths))], lengths, strict=True))
        self.free = (1 + torch.randperm(NUM_BLOCKS, generator=generator)).tolist()
        self.blocks: dict[str, list[int]] = {name: [] for name in self.lengths}
        self.token_ids = {
            name: torch.randint(CONFIG.vocab_size, (length,), generator=generator).tolist()
            for name, length in self.lengths.items()
        }

    def first_step(self) -> SchedulerOutput:
        new = [
            NewRequestData(name, ids, len(ids), SamplingParams(), (), [self._grow(name)], len(ids) - 1)
            for name, ids in self.token_ids.items()
        ]
        return step_of(dict.fromkeys(self.lengths, 1), new=new)

    def next_step(self) -> SchedulerOutput:
        known = []
        for name in self.lengths:
            self.lengths[name] += 1
            known.append(Known(name, [self._grow(name)], self.lengths[name] - 1))
        return step_of(dict.fromkeys(self.lengths, 1), known=known)

    def written_slots(self) -> list[int]:
        return [
            blocks[(self.lengths[name] - 1) // BLOCK_SIZE] * BLOCK_SIZE + (self.lengths[name] - 1) % BLOCK_SIZE
            for name, blocks in self.blocks.items()
        ]

    def _grow(self, name: str) -> list[int]:
        count = -(-self.lengths[name] // BLOCK_SIZE) - len(self.blocks[name])
        added = [self.free.pop() for _ in range(count)]
        self.blocks[name] += added
        return added


def lengths_of(num_reqs: int, is_long: bool) -> list[int]:
    """From 1 to what the shorter table holds five steps later; with a request beyond it, if `is_long`."""
    lengths = [1 + (5 * index) % (SHORT_CONTEXT - 5) for index in range(num_reqs)]
    return [*lengths[:-1], 37] if is_long else lengths


@pytest.mark.gpu
@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("num_reqs", BATCH_SIZES)
@torch.inference_mode()
def test_replays_equal_eager_steps(engine: Engine, num_reqs: int, is_long: bool) -> None:
    """A step with tokens of the host, one with the device's, and four that the graph goes on with by itself."""
    engine.fill_caches()
    requests = Requests(lengths_of(num_reqs, is_long))
    batch, eager_batch = (InputBatch(MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE) for _ in range(2))
    written, num_new_blocks = set(), 0
    for index in range(6):
        scheduled = requests.next_step() if index else requests.first_step()
        batch.update(scheduled)
        num_blocks = batch.repeats(scheduled)
        assert (num_blocks is not None) == (index > 1)
        if num_blocks is None:
            step = batch.build(scheduled)
            assert engine.graphs.fits(step)
            output = engine.graphs.replay(step, engine.buffers)
        else:
            assert engine.graphs.holds(num_blocks)
            repeat = batch.build_repeat(scheduled)
            num_new_blocks += len(repeat.new_blocks)
            output = engine.graphs.replay_again(repeat, engine.buffers)
        logits, outcomes = engine.run_eagerly(eager_batch, scheduled)
        assert output.logits.isfinite().all()
        same(engine, output.logits, logits)
        assert output.outcomes.tolist() == output.logits.argmax(-1).tolist() == outcomes.tolist()
        assert torch.equal(engine.graph_token_ids[:-1], engine.eager_token_ids[:-1])
        written |= set(requests.written_slots())
    assert num_new_blocks == num_reqs, "four steps on, with blocks of four, each request needs one"
    last = engine.graphs._last
    assert last is not None
    assert last.width == (MAX_MODEL_LEN if is_long else SHORT_CONTEXT) // BLOCK_SIZE
    assert last.size == min(size for size in (1, 2, 4, 8, 16, 20) if size >= num_reqs)
    check_caches(engine, written, has_padding=last.size > num_reqs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [1, 3, 8, 17, 20])
@torch.inference_mode()
def test_draws_equal_those_of_the_reference(engine: Engine, num_reqs: int) -> None:
    """Of several steps that repeat one, of others behind them, and of fewer requests than the graph has rows."""
    engine.fill_caches()
    requests = Requests(lengths_of(num_reqs, False))
    batch = InputBatch(MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE)
    scheduled = requests.first_step()
    batch.update(scheduled)
    step = batch.build(scheduled)
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.3)[index % 3],
            top_k=(0, 5)[index % 2],
            top_p=(1.0, 0.8)[index % 2],
            seed=2**62 + index,
        )
        for index in range(num_reqs)
    ]
    seen = set()
    for first_position in (0, 100):
        params.reverse()
        for position in range(first_position, first_position + 4):
            metadata = SamplingMetadata(params, [position] * num_reqs, [()] * num_reqs)
            tensors = SamplingTensors.build(metadata, DEVICE)
            logits = engine.graphs.replay(step, engine.buffers).logits.clone()
            if position == first_position:
                engine.graphs.start_draws(metadata, engine.buffers)
            outcomes = engine.graphs.draw(num_reqs)
            if tensors is None:
                assert all(each.temperature == 0 for each in params)
                continue
            given = (tensors.temperature, tensors.top_k, tensors.top_p, tensors.draws)
            expected, finite = sample_tokens(logits.cpu(), *(tensor.cpu() for tensor in given))
            assert finite.all()
            assert outcomes.tolist() == expected.tolist()
            assert engine.graph_token_ids[torch.from_numpy(step.sampled_rows)].tolist() == expected.tolist()
            seen.add(tuple(expected.tolist()))
    assert len(seen) > 1 or num_reqs == 1, "draws differ from step to step"


@pytest.mark.gpu
@torch.inference_mode()
def test_rows_that_are_not_sampled_keep_their_token(engine: Engine) -> None:
    """The last but one token of a prompt, alone in its step: its row must not take what the graph chooses for it."""
    engine.fill_caches()
    batch = InputBatch(MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE)
    part = NewRequestData("part", [1, 2, 3], 3, SamplingParams(), (), [[5]], 1)
    whole = NewRequestData("whole", [1, 2, 3], 3, SamplingParams(), (), [[6]], 2)
    scheduled = step_of({"part": 1, "whole": 1}, new=(part, whole))
    batch.update(scheduled)
    step = batch.build(scheduled)
    assert step.sampled_request_ids == ["whole"]
    engine.graph_token_ids.fill_(55)
    output = engine.graphs.replay(step, engine.buffers)
    row_of_whole, row_of_part = step.token_rows.tolist()  # the longer one comes first
    assert int(engine.graph_token_ids[row_of_part]) == 55
    assert int(engine.graph_token_ids[row_of_whole]) == int(output.outcomes[0])


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_goes_on_only_as_far_as_its_table_reaches(engine: Engine) -> None:
    engine.fill_caches()
    batch = InputBatch(MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE)
    scheduled = Requests([SHORT_CONTEXT - 1]).first_step()
    batch.update(scheduled)
    engine.graphs.replay(batch.build(scheduled), engine.buffers)
    assert engine.graphs.holds(SHORT_CONTEXT // BLOCK_SIZE)
    assert not engine.graphs.holds(SHORT_CONTEXT // BLOCK_SIZE + 1)
    engine.graphs.forget()
    assert not engine.graphs.holds(1)


@pytest.mark.gpu
def test_only_decode_steps_fit(engine: Engine) -> None:
    def step(**sizes: int) -> Any:
        batch = InputBatch(MAX_NUM_REQS + 5, MAX_MODEL_LEN, BLOCK_SIZE)
        new = [NewRequestData(name, [1] * n, n, SamplingParams(), (), [[1]], 0) for name, n in sizes.items()]
        scheduled = step_of(sizes, new=new)
        batch.update(scheduled)
        return batch.build(scheduled)

    assert engine.graphs.fits(step(a=1, b=1))
    assert not engine.graphs.fits(step(a=1, b=2))
    assert engine.graphs.fits(step(**{f"r{index}": 1 for index in range(MAX_NUM_REQS)}))
    assert not engine.graphs.fits(step(**{f"r{index}": 1 for index in range(MAX_NUM_REQS + 1)}))
