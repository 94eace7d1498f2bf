"""The generic decoder over a paged cache against transformers' dense forward pass, fp32.

Head sizes that are not hidden size by heads, biases and ratios of heads must not be taken for granted
(NVIDIA/TensorRT-LLM#5912, SafeAILab/EAGLE#315, sbryngelson/ANEForge#253).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource
from tests.helpers import assert_greedy, dense_logits, make_tiny_llama, paged_logits

CPU = torch.device("cpu")

CONFIGS: dict[str, dict[str, Any]] = {
    "gqa 9/3": {},
    "one kv head": {"num_key_value_heads": 1},
    "no gqa": {"num_key_value_heads": 9},
    "head_dim above": {"head_dim": 96},
    "head_dim below": {"head_dim": 4, "num_attention_heads": 6, "num_key_value_heads": 2},
    "gqa 14/2": {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "head_dim": 24,
    },
    "sharded": {"max_shard_size": "100KB", "attention_bias": True},
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(ModelSource(str(folder), "folder", path=folder), device=CPU, dtype=dtype)


def random_ids(num_tokens: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 512, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadedModel]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return folder, load(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    folder = make_tiny_llama(tmp_path, **CONFIGS[name])
    loaded = load(folder)
    assert loaded.notices == ()
    token_ids = random_ids(77)
    logits = paged_logits(loaded.model, token_ids)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, dense_logits(folder, token_ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("block_size", [1, 2, 16, 128])
@pytest.mark.parametrize("chunk_sizes", [[1] * 60, [16, 16, 16, 12], [5, 1, 1, 30, 23], [59, 1]])
def test_chunked_and_token_by_token_equal_whole(
    tiny: tuple[Path, LoadedModel], chunk_sizes: list[int], block_size: int
) -> None:
    folder, loaded = tiny
    token_ids = random_ids(60)
    chunked = paged_logits(loaded.model, token_ids, chunk_sizes=chunk_sizes, block_size=block_size)
    torch.testing.assert_close(chunked, dense_logits(folder, token_ids), atol=1e-4, rtol=0)
    torch.testing.assert_close(chunked, paged_logits(loaded.model, token_ids), atol=1e-4, rtol=0)


def test_a_mixed_batch_equals_each_request_alone(tiny: tuple[Path, LoadedModel]) -> None:
    """One step holds a whole prefill, a later chunk and a decode row of three requests."""
    folder, loaded = tiny
    config, block_size = loaded.config, 4
    computed, scheduled = [0, 9, 21], [13, 6, 1]
    prompts = [random_ids(c + s, seed=c) for c, s in zip(computed, scheduled, strict=True)]
    block_table = 1 + torch.randperm(18, generator=torch.Generator().manual_seed(0)).view(3, 6).int()
    layer_caches = [
        LayerCache.zeros(18, block_size, config.num_kv_heads, config.head_dim, torch.float32, CPU)
        for _ in range(config.num_layers)
    ]

    def step(starts: list[int], sizes: list[int]) -> torch.Tensor:
        requests = torch.arange(3).repeat_interleave(torch.tensor(sizes))
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)])
        ids = torch.tensor([prompts[r][p] for r, p in zip(requests.tolist(), positions.tolist(), strict=True)])
        slots = block_table[requests, positions // block_size].long() * block_size + positions % block_size
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *sizes]).cumsum(0).int(),
            seq_lens=torch.tensor([a + n for a, n in zip(starts, sizes, strict=True)], dtype=torch.int32),
            block_table=block_table,
            slot_mapping=slots,
            positions=positions,
            num_decodes=0,
        )
        return loaded.model(ids, positions, layer_caches, metadata, ReferenceAttention())

    step([0, 0, 0], [0, 9, 21])
    logits = loaded.model.compute_logits(step(computed, scheduled)).split(scheduled)
    for prompt, start, rows in zip(prompts, computed, logits, strict=True):
        torch.testing.assert_close(rows, dense_logits(folder, prompt)[start:], atol=1e-4, rtol=0)


def test_greedy_continuation_is_transformers_own(tiny: tuple[Path, LoadedModel]) -> None:
    folder, loaded = tiny
    prompt, chosen = random_ids(20), []
    for _ in range(16):
        token_ids = prompt + chosen
        logits = paged_logits(loaded.model, token_ids, chunk_sizes=[20] + [1] * len(chosen))
        chosen.append(int(logits[-1].argmax()))
    assert_greedy(folder, prompt, chosen)


def test_logits_of_chosen_rows_only(tiny: tuple[Path, LoadedModel]) -> None:
    _, loaded = tiny
    hidden = torch.randn(6, loaded.config.hidden_size)
    whole = loaded.model.compute_logits(hidden)
    torch.testing.assert_close(loaded.model.compute_logits(hidden[[1, 4]]), whole[[1, 4]], atol=1e-5, rtol=1e-5)
    assert loaded.model.compute_logits(hidden[:0]).shape == (0, loaded.config.vocab_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_tiny_llama(tmp_path)
    token_ids = random_ids(50)
    logits = paged_logits(load(folder, dtype).model, token_ids)
    assert logits.dtype == torch.float32
    difference = (logits - dense_logits(folder, token_ids)).abs()
    assert difference.mean() < (0.06 if dtype == torch.bfloat16 else 0.01)  # the logits' spread is 3


def test_nothing_records_gradients(tiny: tuple[Path, LoadedModel]) -> None:
    _, loaded = tiny
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.compute_logits(torch.randn(1, loaded.config.hidden_size)).is_inference()
