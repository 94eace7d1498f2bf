"""Heads on a CUDA device: their target's kernels, its caches, and drafts that are those of the head alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine.engine_host import EngineHost
from backend.models.sources import resolve_source
from backend.spec_decode.draft_tree import DEFAULT_TREES
from backend.spec_decode.heads.head_config import HeadKind
from backend.spec_decode.heads.target import DenseTarget
from tests.engine.driving import answers, config_of, tokens
from tests.engine.heads import (
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
from tests.engine.test_gpu import prompts
from tests.engine.test_speculation_gpu import GREEDY, MANY_WAYS, ON_CUDA
from tests.helpers import dense_greedy, load_oracle
from tests.spec_decode.tiny_heads import CPU

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu_host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[HeadKind, Path]:
    folder, target = tmp_path_factory.mktemp("heads"), DenseTarget.load(resolve_source(str(tiny_llama)), CPU)
    vocabulary = torch.arange(0, 512, 2)
    return {kind: save(folder / kind, random_head(kind, target), kind, tiny_llama, vocabulary) for kind in KINDS}


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    oracle = load_oracle(tiny_llama)
    return {key: dense_greedy(oracle, prompt, 20) for key, prompt in prompts().items()}


@pytest.mark.parametrize("overrides", MANY_WAYS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_dense_model_and_drafts_those_of_the_head_alone(
    gpu_host: EngineHost,
    tiny_llama: Path,
    heads: dict[HeadKind, Path],
    expected: dict[str, list[int]],
    kind: HeadKind,
    overrides: dict[str, Any],
) -> None:
    info = gpu_host.load(heading(tiny_llama, kind, heads[kind], **ON_CUDA, **overrides))
    has_graphs = not overrides.get("kernels__enforce_eager") and overrides.get("kernels__backend") != "reference"
    assert info.resolved_config.kernels.enforce_eager != has_graphs
    drafter = load_drafter(heads[kind], tiny_llama)
    for _ in range(2):
        collected, rounds = answers_and_rounds(gpu_host, prompts(), **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
        assert num_drafted(rounds) > 50
        assert all(it.draft_ms > 0 and it.verify_ms > 0 for it in rounds)
        check_drafts(drafter, prompts(), collected, rounds[::6])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overrides", [{"cache__dtype": "int8"}, {"quantization__method": "int8"}], ids=str)
def test_tokens_are_those_of_plain_decoding_where_weights_or_cache_are_quantized(
    gpu_host: EngineHost, tiny_llama: Path, heads: dict[HeadKind, Path], kind: HeadKind, overrides: dict[str, Any]
) -> None:
    gpu_host.load(config_of(tiny_llama, **ON_CUDA, **overrides))
    plain = tokens(gpu_host, prompts(), **GREEDY)
    gpu_host.load(heading(tiny_llama, kind, heads[kind], **ON_CUDA, **overrides))
    assert tokens(gpu_host, prompts(), **GREEDY) == plain


TREE_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"kernels__enforce_eager": True, "cache__block_size": 8},
    {"kernels__backend": "reference"},
    {"cache__dtype": "int8"},
    {"model__dtype": "bfloat16"},
)


@pytest.mark.parametrize("overrides", TREE_WAYS, ids=str)
def test_trees_give_the_tokens_of_plain_decoding(
    gpu_host: EngineHost,
    tiny_llama: Path,
    heads: dict[HeadKind, Path],
    monkeypatch: pytest.MonkeyPatch,
    overrides: dict[str, Any],
) -> None:
    """In fp32; else sums of another order decide now and then. Branches lie between the tokens that are accepted."""
    options = {**ON_CUDA, **overrides}
    gpu_host.load(config_of(tiny_llama, **options))
    plain = tokens(gpu_host, prompts(), **GREEDY)
    texts, tree = {key: [*prompt, *plain[key]] for key, prompt in prompts().items()}, DEFAULT_TREES["eagle"]
    plant_paths(monkeypatch, tree, texts, (25, 8, 15, 3, 21))
    gpu_host.load(heading(tiny_llama, "eagle", heads["eagle"], speculative__tree=True, **options))
    for _ in range(2):
        collected, rounds = answers_and_rounds(gpu_host, prompts(), **GREEDY)
        same = [collected[key].token_ids == plain[key] for key in plain]
        assert all(same) or ("model__dtype" in overrides and any(same))
        assert max(it.num_accepted for it in rounds) == 5
        assert sum(it.num_accepted for it in rounds) > 40
        assert max(it.num_nodes or 0 for it in rounds) == tree.num_drafted


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_in_bfloat16(
    gpu_host: EngineHost, tiny_llama: Path, heads: dict[HeadKind, Path], kind: HeadKind, tree: bool
) -> None:
    options: dict[str, Any] = {"model__device": "cuda", "model__dtype": "bfloat16", "speculative__tree": tree}
    gpu_host.load(heading(tiny_llama, kind, heads[kind], **options))
    collected = answers(gpu_host, prompts(), temperature=0.9, top_k=30, top_p=0.95, seed=1, **GREEDY)
    assert {answer.finish_reason for answer in collected.values()} == {"length"}
    assert all(answer.last.speculation and answer.last.speculation.num_draft_tokens for answer in collected.values())
