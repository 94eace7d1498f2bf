"""The engine on a CUDA device, through the same references as on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backend.engine.engine_host import EngineHost
from backend.errors import CapacityError
from backend.models.sources import ModelSource
from tests.engine.driving import answers, config_of, tokens
from tests.helpers import assert_greedy, dense_greedy, load_oracle

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu_host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


def prompts() -> dict[str, list[int]]:
    rng = random.Random(4)
    return {f"p{length}": [rng.randrange(256) for _ in range(length)] for length in (1, 15, 16, 17, 100, 513)}


def test_fp32_gives_the_tokens_of_the_dense_model(gpu_host: EngineHost, tiny_llama: Path) -> None:
    oracle = load_oracle(tiny_llama)
    expected = {key: dense_greedy(oracle, prompt, 20) for key, prompt in prompts().items()}
    for overrides in ({}, {"scheduler__max_num_batched_tokens": 33}, {"cache__num_blocks": 40}):
        gpu_host.load(config_of(tiny_llama, model__device="cuda", model__dtype="float32", **overrides))
        assert tokens(gpu_host, prompts(), max_tokens=20, ignore_eos=True) == expected


def test_the_default_model_in_its_default_dtype(gpu_host: EngineHost, smollm2: ModelSource) -> None:
    """bfloat16 against transformers in fp32: a difference is excused at a top-2 gap below what bf16 resolves there."""
    info = gpu_host.load(config_of(smollm2.name, model__device="auto"))
    assert (info.resolved_config.model.device, info.resolved_config.model.dtype) == ("cuda", "bfloat16")
    tokenizer = gpu_host.tokenizer
    texts = ("Why is the sky blue?", "Count from 1 to 20.", "Write a haiku about snow.", "What is 17 * 23?")
    questions = {text: tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts}
    oracle = load_oracle(smollm2.path)  # type: ignore[arg-type]
    for text, answer in answers(gpu_host, questions, max_tokens=48, ignore_eos=True).items():
        assert_greedy(oracle, questions[text], answer.token_ids, max_gap=0.5)


def test_the_pool_keeps_to_its_share_of_the_card(gpu_host: EngineHost) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    gpu_host.load(config_of("dummy:llama-3.1-8b", model__device="cuda", cache__gpu_memory_utilization=0.6))
    tokens(gpu_host, {str(n): [n] * 2000 for n in range(16)}, max_tokens=8, ignore_eos=True)
    free = torch.cuda.mem_get_info()[0]
    assert 0.5 * total < total - free <= 0.62 * total


def test_loads_in_a_row_leak_nothing(gpu_host: EngineHost) -> None:
    allocated = []
    for block_size in (16, 32, 16, 32):
        gpu_host.load(
            config_of("dummy:llama-3.1-8b", model__device="cuda", cache__block_size=block_size, cache__num_blocks=256)
        )
        tokens(gpu_host, {"a": [1, 2, 3]}, max_tokens=4)
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[2] == pytest.approx(allocated[0], rel=0.01)
    assert allocated[3] == pytest.approx(allocated[1], rel=0.01)


def test_what_does_not_fit_is_refused_and_the_memory_comes_back(gpu_host: EngineHost) -> None:
    for overrides in ({"cache__num_blocks": 10_000_000}, {"cache__gpu_memory_utilization": 0.1}):
        with pytest.raises(CapacityError, match=r"num_blocks|gpu_memory_utilization") as kept:
            gpu_host.load(config_of("dummy:llama-3.1-8b", model__device="cuda", **overrides))
        assert torch.cuda.memory_allocated() < 2**28, f"the error holds the weights: {kept}"
    gpu_host.load(config_of("dummy:tiny", model__device="cuda"))
    assert len(tokens(gpu_host, {"a": [1]}, max_tokens=3)["a"]) == 3
