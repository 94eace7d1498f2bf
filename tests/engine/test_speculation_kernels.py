"""Drafts and their verification over the Triton kernels, on a CPU through the interpreter."""

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
from tests.helpers import dense_greedy, load_oracle, make_tiny_llama  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="through the interpreter; test_speculation_gpu.py has the kernels"
)

PROMPTS = {"one": [200], "longer": [*range(30, 39)]}
ON_KERNELS = {"kernels__backend": "triton", "kernels__enforce_eager": True, "cache__block_size": 2}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineHost]:
    monkeypatch.setattr(Decoder, "prepare", lambda self: None)  # weights as a GPU has them, not laid out for a CPU
    host = EngineHost()
    yield host
    host.close()


@pytest.mark.parametrize("own", [True, False], ids=["a model", "first layers"])
def test_a_draft_model_leaves_the_tokens_of_the_dense_model(host: EngineHost, tmp_path: Path, own: bool) -> None:
    """The target as its own draft is right every time: in rounds of three, the last one shorter."""
    shape = {"hidden_size": 56, "intermediate_size": 40, "vocab_size": 272, "num_hidden_layers": 2}
    model = make_tiny_llama(tmp_path, **shape, num_attention_heads=14, num_key_value_heads=2, head_dim=20)
    oracle = load_oracle(model)
    expected = {key: dense_greedy(oracle, prompt, 6) for key, prompt in PROMPTS.items()}
    draft = {"speculative__model": str(model)} if own else {}
    speculative = {"speculative__method": "draft_model", "speculative__num_speculative_tokens": 2} | draft
    host.load(config_of(model, **ON_KERNELS, **speculative))
    collected = answers(host, PROMPTS, max_tokens=6, ignore_eos=True)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    if own:
        assert {answer.last.speculation for answer in collected.values()} == {(2, 3, 3)}
        # The same by draws: what is drafted has the target's distribution, by both kernels and by plain torch.
        sampled = answers(host, PROMPTS, max_tokens=6, ignore_eos=True, temperature=0.7, top_k=20, seed=2)
        assert {answer.last.speculation for answer in sampled.values()} == {(2, 3, 3)}


def test_lookahead_leaves_the_tokens_of_the_dense_model(host: EngineHost, tmp_path: Path) -> None:
    """Drafts and a window in one pass under a mask, beside a prompt that comes in chunks."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 272, "num_hidden_layers": 1}
    model = make_tiny_llama(tmp_path, **shape, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    oracle = load_oracle(model)
    expected = {key: dense_greedy(oracle, prompt, 5) for key, prompt in PROMPTS.items()}
    settings = {"method": "lookahead", "num_speculative_tokens": 2, "lookahead_window": 2, "lookahead_ngram": 3}
    speculative = {f"speculative__{key}": value for key, value in settings.items()}
    host.load(config_of(model, **ON_KERNELS, **speculative, scheduler__max_num_batched_tokens=9))
    collected = answers(host, PROMPTS, max_tokens=5, ignore_eos=True)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert all(answer.last.speculation.num_rounds for answer in collected.values() if answer.last.speculation)
