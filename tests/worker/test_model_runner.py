"""The runner on a CPU: how many blocks it asks for, and steps at the edge of there being anything to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.config import EngineConfig
from backend.core.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from backend.errors import CapacityError
from backend.models.sources import ModelSource, resolve_source
from backend.sampling_params import SamplingParams
from backend.worker.model_runner import ModelRunner
from tests.helpers import dense_greedy, make_tiny_llama
from tests.worker.traffic import Known, step_of

# dummy:tiny in fp32: 3 layers, 2 KV heads of 16: 2 * 3 * 2 * 16 * 4 bytes a token.
TINY_BYTES_PER_TOKEN = 768


@pytest.fixture(autouse=True)
def keep_torch_threads() -> Iterator[None]:
    """A runner sets the number of threads for the whole process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def runner_of(source: ModelSource, **overrides: Any) -> ModelRunner:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    config = EngineConfig().with_overrides({"model.name": source.name, "scheduler.max_num_seqs": 4} | dotted)
    runner = ModelRunner(config.resolve(device="cpu", max_model_len=1024))
    runner.load_model(source)
    return runner


def dummy_runner(**overrides: Any) -> ModelRunner:
    return runner_of(resolve_source("dummy:tiny"), **overrides)


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("cpu_bytes", [2**20, 2**20 + 12_345])
def test_the_budget_of_the_cpu_decides(cpu_bytes: int, block_size: int) -> None:
    runner = dummy_runner(cache__cpu_bytes=cpu_bytes, cache__block_size=block_size)
    num_blocks = runner.determine_num_blocks()
    per_block = block_size * TINY_BYTES_PER_TOKEN
    assert (num_blocks + 1) * per_block <= cpu_bytes < (num_blocks + 2) * per_block
    runner.initialize_kv_cache(num_blocks, 1024)
    assert runner.memory().kv_cache_bytes == (num_blocks + 1) * per_block


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "block_size", "useful"),
    [(4, 1024, 16, 256), (3, 65, 16, 15), (3, 64, 16, 12), (1, 2, 256, 1), (2, 33, 1, 66)],
)
def test_no_more_blocks_than_could_ever_be_used(
    max_num_seqs: int, max_model_len: int, block_size: int, useful: int
) -> None:
    """Every request at its full length, the last block of each partly filled."""
    runner = dummy_runner(
        scheduler__max_num_seqs=max_num_seqs, model__max_model_len=max_model_len, cache__block_size=block_size
    )
    assert runner.determine_num_blocks() == useful


@pytest.mark.parametrize("num_blocks", [1, 7, 100_000])
def test_a_number_that_was_asked_for_is_taken_as_it_is(num_blocks: int) -> None:
    """Also above the memory settings and above what could be used: it is there for experiments."""
    runner = dummy_runner(cache__num_blocks=num_blocks, cache__cpu_bytes=2**20, model__max_model_len=16)
    assert runner.determine_num_blocks() == num_blocks


def test_a_budget_below_two_blocks_names_the_setting_and_the_block(tmp_path: Path) -> None:
    """One layer of 9 KV heads of 96: 1,769,472 bytes for a block of 256 tokens."""
    folder = make_tiny_llama(tmp_path, num_hidden_layers=1, num_key_value_heads=9, head_dim=96)
    runner = runner_of(ModelSource(str(folder), "folder", path=folder), cache__cpu_bytes=2**20, cache__block_size=256)
    with pytest.raises(CapacityError, match=r"^cache.cpu_bytes = 1,048,576 leaves .* takes 1,769,472 and two"):
        runner.determine_num_blocks()


# Steps


def new_request(request_id: str, token_ids: list[int], blocks: list[int], num_prompt_tokens: int) -> NewRequestData:
    return NewRequestData(request_id, list(token_ids), num_prompt_tokens, SamplingParams(), (), [blocks], 0)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def runner(tiny_llama: Path) -> ModelRunner:
    runner = runner_of(ModelSource(str(tiny_llama), "folder", path=tiny_llama), cache__block_size=4)
    runner.initialize_kv_cache(12, 48)
    return runner


PROMPT = [10, 20, 30, 40, 50, 60]


def run_step(runner: ModelRunner, scheduled: SchedulerOutput) -> ModelRunnerOutput:
    return runner.submit(scheduled).result()


def test_a_prompt_in_chunks_is_sampled_once_and_goes_on_after_a_preemption(
    runner: ModelRunner, tiny_llama: Path
) -> None:
    """Steps with nothing to sample, an empty one that only preempts, and the request's return in other blocks."""
    expected = dense_greedy(tiny_llama, PROMPT, 4)
    first = run_step(runner, step_of(new=(new_request("a", PROMPT, [5], 6),), num_scheduled_tokens={"a": 4}))
    assert (first.sampled_token_ids, first.errors) == ({}, {})
    second = run_step(runner, step_of(known=(Known("a", [[2]], 4),), num_scheduled_tokens={"a": 1}))
    assert (second.sampled_token_ids, second.errors) == ({}, {})
    third = run_step(runner, step_of(known=(Known("a", [[]], 5),), num_scheduled_tokens={"a": 1}))
    assert third.sampled_token_ids == {"a": expected[:1]}
    fourth = run_step(runner, step_of(known=(Known("a", [[]], 6),), num_scheduled_tokens={"a": 1}))
    assert fourth.sampled_token_ids == {"a": expected[1:2]}

    empty = run_step(runner, step_of(preempted=("a",)))
    assert (empty.sampled_token_ids, empty.errors) == ({}, {})
    resumed = new_request("a", PROMPT + expected[:2], [9, 1], 6)
    assert run_step(runner, step_of(new=(resumed,), num_scheduled_tokens={"a": 6})).sampled_token_ids == {}
    again = run_step(runner, step_of(known=(Known("a", [[]], 6),), num_scheduled_tokens={"a": 2}))
    assert again.sampled_token_ids == {"a": expected[2:3]}
    last = run_step(runner, step_of(known=(Known("a", [[3]], 8),), num_scheduled_tokens={"a": 1}))
    assert last.sampled_token_ids == {"a": expected[3:]}


def test_a_step_may_be_submitted_before_the_last_ones_tokens_are_asked_for(
    runner: ModelRunner, tiny_llama: Path
) -> None:
    """The second step's input is the first one's token, which only the device knows."""
    expected = {"a": dense_greedy(tiny_llama, PROMPT, 3), "b": dense_greedy(tiny_llama, [7, 8, 9], 3)}
    prompts = (new_request("a", PROMPT, [5, 2], 6), new_request("b", [7, 8, 9], [3], 3))
    pending = [runner.submit(step_of({"a": 6, "b": 3}, new=prompts))]
    pending.append(runner.submit(step_of({"b": 1, "a": 1}, known=(Known("b", [[]], 3), Known("a", [[]], 6)))))
    first = pending.pop(0).result()
    pending.append(runner.submit(step_of({"b": 1, "a": 1}, known=(Known("b", [[8]], 4), Known("a", [[]], 7)))))
    outputs = [first, *[step.result() for step in pending]]
    for index, output in enumerate(outputs):
        assert output.sampled_token_ids == {key: [ids[index]] for key, ids in expected.items()}


def test_an_empty_step_does_nothing_and_forgets_who_ended(runner: ModelRunner, tiny_llama: Path) -> None:
    nothing = run_step(runner, step_of())
    assert (nothing.sampled_token_ids, nothing.errors) == ({}, {})
    names = [f"{turn}{slot}" for turn in range(3) for slot in range(4)]  # four rows, three times over
    expected = {"x": dense_greedy(tiny_llama, PROMPT, 1)}["x"]
    for turn in range(3):
        here = names[4 * turn : 4 * turn + 4]
        news = tuple(new_request(name, PROMPT, [1 + 2 * i, 2 + 2 * i], 6) for i, name in enumerate(here))
        output = run_step(runner, step_of(new=news, num_scheduled_tokens=dict.fromkeys(here, 6)))
        assert output.sampled_token_ids == dict.fromkeys(here, expected)
        ended = run_step(runner, step_of(finished=tuple(here)))
        assert (ended.sampled_token_ids, ended.errors) == ({}, {})


def test_only_rows_that_are_sampled_answer_in_batch_order(runner: ModelRunner, tiny_llama: Path) -> None:
    other = [7, 8, 9]
    output = run_step(
        runner,
        step_of(
            new=(
                new_request("chunk", PROMPT, [1], 6),
                new_request("b", other, [2], 3),
                new_request("a", PROMPT, [3, 4], 6),
            ),
            num_scheduled_tokens={"b": 3, "chunk": 4, "a": 6},
        ),
    )
    assert list(output.sampled_token_ids.items()) == [
        ("b", dense_greedy(tiny_llama, other, 1)),
        ("a", dense_greedy(tiny_llama, PROMPT, 1)),
    ]


def test_no_step_without_a_cache_and_nothing_is_held_after_the_end(tiny_llama: Path) -> None:
    runner = runner_of(ModelSource(str(tiny_llama), "folder", path=tiny_llama))
    with pytest.raises(RuntimeError, match="KV cache is not initialized"):
        run_step(runner, step_of())
    runner.initialize_kv_cache(4, 64)
    held = runner.memory()
    assert (held.weights_bytes, held.device_memory_bytes) == (runner.loaded.weights_bytes, None)
    assert held.kv_cache_bytes == 5 * runner.kv_cache_shape.bytes_per_block
    runner.shutdown()
    assert (runner.memory().weights_bytes, runner.memory().kv_cache_bytes) == (0, 0)
    with pytest.raises(RuntimeError, match="no model is loaded"):
        _ = runner.loaded
