"""Heads behind a target on the Triton kernels, on a CPU through the interpreter: what it leaves for them, and their drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interpreter import interpret_without_cuda

interpret_without_cuda()

from backend.engine.engine_host import EngineHost  # noqa: E402
from backend.layers.linear import Linear  # noqa: E402
from backend.models.sources import resolve_source  # noqa: E402
from backend.spec_decode.draft_tree import DraftTree  # noqa: E402
from backend.spec_decode.heads.head_config import HeadKind  # noqa: E402
from backend.spec_decode.heads.target import DenseTarget  # noqa: E402
from tests.engine.heads import (  # noqa: E402
    KINDS,
    answers_and_rounds,
    check_drafts,
    heading,
    load_drafter,
    num_drafted,
    plant_paths,
    random_head,
    save,
)
from tests.helpers import dense_greedy, load_oracle, make_tiny_llama  # noqa: E402
from tests.spec_decode.tiny_heads import CPU  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="through the interpreter; test_heads_gpu.py has kernels"
)

PROMPTS = {"one": [200], "longer": [*range(30, 39)]}
TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1]])
ON_KERNELS: dict[str, Any] = {"kernels__backend": "triton", "kernels__enforce_eager": True, "cache__block_size": 2}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineHost]:
    monkeypatch.setattr(Linear, "prepare", lambda self: None)  # weights as a GPU has them, not laid out for a CPU
    host = EngineHost()
    yield host
    host.close()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_dense_model_s_and_drafts_those_of_the_head_alone(
    host: EngineHost, tmp_path: Path, kind: HeadKind
) -> None:
    shape = {"hidden_size": 56, "intermediate_size": 40, "vocab_size": 272, "num_hidden_layers": 2}
    model = make_tiny_llama(tmp_path / "model", **shape, num_attention_heads=14, num_key_value_heads=2, head_dim=20)
    target = DenseTarget.load(resolve_source(str(model)), CPU)
    head = save(tmp_path / "head", random_head(kind, target, (1, 2)), kind, model, torch.arange(0, 272, 2), (1, 2))
    oracle = load_oracle(model)
    expected = {key: dense_greedy(oracle, prompt, 5) for key, prompt in PROMPTS.items()}
    host.load(heading(model, kind, head, **ON_KERNELS, speculative__num_speculative_tokens=2))
    collected, rounds = answers_and_rounds(host, PROMPTS, max_tokens=5, ignore_eos=True)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert num_drafted(rounds) > 6
    check_drafts(load_drafter(head, model), PROMPTS, collected, rounds)


def test_trees_on_kernels(host: EngineHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 56, "intermediate_size": 40, "vocab_size": 272, "num_hidden_layers": 2}
    model = make_tiny_llama(tmp_path / "model", **shape, num_attention_heads=14, num_key_value_heads=2, head_dim=20)
    target = DenseTarget.load(resolve_source(str(model)), CPU)
    head = save(tmp_path / "head", random_head("eagle", target, (1, 2)), "eagle", model, torch.arange(272), (1, 2))
    oracle = load_oracle(model)
    expected = {key: dense_greedy(oracle, prompt, 9) for key, prompt in PROMPTS.items()}
    plant_paths(monkeypatch, TREE, {key: [*PROMPTS[key], *expected[key]] for key in PROMPTS}, [5])
    monkeypatch.setattr("backend.speculative_settings.DEFAULT_TREES", {"eagle": TREE})
    host.load(heading(model, "eagle", head, **ON_KERNELS, speculative__tree=True))
    collected, rounds = answers_and_rounds(host, PROMPTS, max_tokens=9, ignore_eos=True)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert max(it.num_accepted for it in rounds) == 2
    assert sum(it.num_accepted for it in rounds) > 6
