"""Scheduler, allocator, worker and every Triton kernel at once, on a CPU through the interpreter.

A number that two of them hold by themselves, such as the tokens of a block, shows in no test of one of them at its default
(Wenyueh/MinivLLM#34): here blocks are of other sizes, heads of an odd size and an odd number, and no layer is the dense
model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.interpreter import interpret_without_cuda

interpret_without_cuda()

from backend.engine.engine_host import EngineHost  # noqa: E402
from backend.models.decoder import Decoder  # noqa: E402
from tests.engine.driving import answers, config_of  # noqa: E402
from tests.helpers import dense_greedy, load_oracle, make_tiny_llama, make_tiny_model  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="through the interpreter; test_gpu.py has the kernels"
)

# Two begin alike; together they are more than a step of 12.
PROMPTS = {"1": [200], "12": [*range(30, 42)], "11+1": [*range(30, 41), 7]}
MAX_TOKENS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven query heads of 20 per KV head."""
    shape = {"hidden_size": 56, "intermediate_size": 40, "vocab_size": 272, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 20}
    return make_tiny_llama(tmp_path_factory.mktemp("odd heads"), **shape, **heads)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    oracle = load_oracle(model)
    return {key: dense_greedy(oracle, prompt, MAX_TOKENS) for key, prompt in PROMPTS.items()}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineHost]:
    monkeypatch.setattr(Decoder, "prepare", lambda self: None)  # weights as a GPU has them, not laid out for a CPU
    host = EngineHost()
    yield host
    host.close()


@pytest.mark.parametrize("block_size", [1, 256])
def test_blocks_of_any_size_give_the_tokens_of_the_dense_model(
    host: EngineHost, model: Path, expected: dict[str, list[int]], block_size: int
) -> None:
    """Prompts in chunks, into an empty prefix cache and out of a full one."""
    host.load(
        config_of(
            model,
            kernels__backend="triton",
            kernels__enforce_eager=True,
            scheduler__max_num_batched_tokens=12,
            cache__block_size=block_size,
        )
    )
    for _ in range(2):
        collected = answers(host, PROMPTS, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
    hits = {key: answer.last.num_cached_tokens for key, answer in collected.items()}
    assert hits == {key: (len(prompt) - 1) // block_size * block_size for key, prompt in PROMPTS.items()}


def test_windows_of_one_layer_of_two(host: EngineHost, tmp_path: Path) -> None:
    """Two KV groups, of which one frees blocks and has them written anew while prompts are under way."""
    shape = {"hidden_size": 56, "intermediate_size": 40, "vocab_size": 272, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2}
    window = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}
    model = make_tiny_model(tmp_path, "Qwen2", **shape, **heads, **window)
    host.load(
        config_of(
            model,
            kernels__backend="triton",
            kernels__enforce_eager=True,
            scheduler__max_num_batched_tokens=6,
            cache__block_size=2,
            cache__num_blocks=18,
        )
    )
    collected = answers(host, PROMPTS, max_tokens=4, ignore_eos=True)
    expected = {key: dense_greedy(model, prompt, 4) for key, prompt in PROMPTS.items()}
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
