"""Lookahead on a CUDA device: kernels with a mask, beside plain steps and prompts in graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from tests.engine.driving import answers
from tests.engine.test_gpu import prompts
from tests.engine.test_lookahead import looking_ahead, rounds_of
from tests.helpers import dense_greedy, load_oracle, make_tiny_model

pytestmark = pytest.mark.gpu

ON_CUDA = {"model__device": "cuda", "model__dtype": "float32"}
MANY_WAYS: list[dict[str, Any]] = [
    {},
    {"kernels__enforce_eager": True},
    {"scheduler__max_num_batched_tokens": 60},
    {"cache__num_blocks": 40},
    {"cache__block_size": 1},
    {"kernels__batch_invariant": True},
    {"kernels__backend": "reference"},
    {"speculative__lookahead_window": 14, "speculative__lookahead_ngram": 5},
]


@pytest.fixture
def gpu_host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@pytest.mark.parametrize("overrides", MANY_WAYS, ids=str)
def test_lookahead_equals_the_dense_model(gpu_host: EngineHost, tiny_llama: Path, overrides: dict[str, Any]) -> None:
    oracle = load_oracle(tiny_llama)
    expected = {key: dense_greedy(oracle, prompt, 40) for key, prompt in prompts().items()}
    gpu_host.load(looking_ahead(tiny_llama, **ON_CUDA, **overrides))
    collected = answers(gpu_host, prompts(), max_tokens=40, ignore_eos=True)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    num_rounds, num_accepted = rounds_of(collected)
    assert num_rounds > 0
    assert num_accepted > 0


def test_lookahead_equals_the_dense_model_with_windows(gpu_host: EngineHost, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    model = make_tiny_model(tmp_path / "model", "Qwen2", **changes)
    oracle = load_oracle(model)
    expected = {key: dense_greedy(oracle, prompt, 24) for key, prompt in prompts().items()}
    gpu_host.load(looking_ahead(model, 8, 5, **ON_CUDA))
    collected = answers(gpu_host, prompts(), max_tokens=24, ignore_eos=True)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
