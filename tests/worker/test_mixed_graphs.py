"""Steps of chunks and single rows replayed from CUDA graphs against the same steps launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backend.core.output import NewRequestData
from backend.sampling_params import SamplingParams
from backend.worker.input_batch import InputBatch, StepInput
from tests.worker.graph_engine import (
    BLOCK_SIZE,
    CONFIG,
    MAX_MODEL_LEN,
    MAX_NUM_REQS,
    MAX_NUM_TOKENS,
    MIXED_SIZES,
    Engine,
    check_caches,
    make_engine,
    same,
)
from tests.worker.traffic import Known, step_of


@pytest.fixture(scope="module", params=[False, True], ids=["by size", "batch invariant"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield make_engine(request.param, monkeypatch)


def new(name: str, length: int, computed: int, blocks: list[int]) -> NewRequestData:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(CONFIG.vocab_size, (length,), generator=generator).tolist()
    return NewRequestData(name, ids, length, SamplingParams(), (), [blocks], computed)


@pytest.mark.gpu
@torch.inference_mode()
def test_replays_equal_eager_steps(engine: Engine) -> None:
    """Chunks of prompts, the end of one beside decodes, a single token: with much padding, little and none."""
    engine.fill_caches()
    batch, eager_batch = (InputBatch(MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE) for _ in range(2))
    written: set[int] = set()
    sizes = []
    for scheduled in (
        # A whole prompt, a part of one, and one whose beginning is there.
        step_of(
            {"a": 5, "b": 3, "c": 2}, new=(new("a", 5, 0, [7, 3]), new("b", 9, 0, [9]), new("c", 12, 10, [4, 2, 8]))
        ),
        step_of({"a": 1, "c": 1, "b": 6}, known=(Known("a", [[]], 5), Known("c", [[6]], 12), Known("b", [[5, 1]], 3))),
        step_of({"a": 1}, known=(Known("a", [[]], 6),)),
        step_of({"b": 1, "d": 31}, new=(new("d", 40, 0, list(range(30, 38))),), known=(Known("b", [[]], 9),)),
    ):
        batch.update(scheduled)
        step = batch.build(scheduled)
        written |= set(step.slot_mappings[0].tolist())
        sizes.append(len(step.token_ids))
        assert engine.mixed_graphs.fits(step)
        output = engine.mixed_graphs.replay(step, engine.buffers)
        logits, outcomes = engine.run_eagerly(eager_batch, scheduled)
        assert output.logits.shape == logits.shape
        same(engine, output.logits, logits)
        assert output.outcomes.tolist() == output.logits.argmax(-1).tolist() == outcomes.tolist()
        assert torch.equal(engine.graph_token_ids[:-1], engine.eager_token_ids[:-1])
    assert sizes == [10, MIXED_SIZES[0], 1, MIXED_SIZES[1]]
    check_caches(engine, written, has_padding=True)


@pytest.mark.gpu
def test_what_is_too_large_does_not_fit(engine: Engine) -> None:
    def step(size: int) -> StepInput:
        batch = InputBatch(MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE)
        scheduled = step_of({"a": size}, new=(new("a", size, 0, list(range(1, 15))),))
        batch.update(scheduled)
        return batch.build(scheduled)

    assert engine.mixed_graphs.fits(step(MAX_NUM_TOKENS))
    assert not engine.mixed_graphs.fits(step(MAX_NUM_TOKENS + 1)), "above the token budget"
