"""The default model against transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backend.attention.metadata import AttentionMetadata, LayerCache
from backend.attention.reference import ReferenceAttention
from backend.engine.engine_host import EngineHost
from backend.models.loader import load_model
from backend.models.sources import ModelSource
from tests.engine.driving import answers, config_of
from tests.helpers import assert_greedy, dense_logits, load_oracle

CHATS = {
    "chat": "Why is the sky blue?",
    "numbers": "What is 1234 + 5678? Then list 3 prime numbers above 90.",
    "emoji": "Explain what 👩‍👩‍👧 and 🇫🇷 stand for 🙂",
    "code": "Write a Python function:\n\n1. named `fib`\n2. returning the n-th Fibonacci number",
}
RAW = {
    "raw": "The capital of France is",
    "raw code": "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
    "raw spaces": "  leading   and double  spaces\n\n\ttab",
    "raw other scripts": "Größe, naïve café, 東京は日本の首都です。",
}


@pytest.fixture(scope="module")
def oracle(smollm2: ModelSource) -> Any:
    return load_oracle(smollm2.path)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def smollm2_host(smollm2: ModelSource) -> Iterator[EngineHost]:
    host = EngineHost()
    host.load(config_of(smollm2.name))
    yield host
    host.close()


def test_logits_agree_at_every_position(smollm2: ModelSource, smollm2_host: EngineHost, oracle: Any) -> None:
    token_ids = smollm2_host.tokenizer.encode(RAW["raw code"] + CHATS["emoji"] + RAW["raw other scripts"])
    loaded = load_model(smollm2, device=torch.device("cpu"), dtype=torch.float32, on_progress=None)
    config, length = loaded.config, len(token_ids)
    caches = [
        LayerCache.zeros(length, 1, config.num_kv_heads, config.head_dim, torch.float32, torch.device("cpu"))
        for _ in range(config.num_layers)
    ]
    positions = torch.arange(length)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_table=torch.arange(1, length + 1, dtype=torch.int32)[None],
        slot_mapping=torch.arange(1, length + 1),
        positions=positions,
        num_decodes=0,
    )
    hidden = loaded.model(torch.tensor(token_ids), positions, caches, metadata, ReferenceAttention())
    assert length > 60
    expected = dense_logits(oracle, token_ids)
    assert (loaded.model.compute_logits(hidden) - expected).abs().max() < 1e-3


def test_greedy_ids_are_those_of_transformers(smollm2_host: EngineHost, oracle: Any) -> None:
    """32 tokens of 8 chat and raw prompts, batched; a first difference is excused only at a top-2 gap under 1e-3."""
    tokenizer = smollm2_host.tokenizer
    prompts = {key: tokenizer.encode_chat([{"role": "user", "content": text}]) for key, text in CHATS.items()}
    prompts |= {key: tokenizer.encode(text) for key, text in RAW.items()}
    collected = answers(smollm2_host, prompts, max_tokens=32, ignore_eos=True)
    for key, answer in collected.items():
        assert len(answer.token_ids) == 32
        assert_greedy(oracle, prompts[key], answer.token_ids)
        assert answer.text == tokenizer.decode(answer.token_ids)


def test_chat_ends_with_its_end_of_turn(smollm2_host: EngineHost) -> None:
    prompt = smollm2_host.tokenizer.encode_chat([{"role": "user", "content": "Reply with the single word: yes"}])
    answer = answers(smollm2_host, {"a": prompt}, max_tokens=100)["a"]
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text
    assert not set(answer.token_ids) & smollm2_host.tokenizer.eos_token_ids
