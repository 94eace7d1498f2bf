"""Speculation on a CUDA device: kernels, graphs, and steps that mix drafts with all else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from tests.engine.driving import answers, config_of
from tests.engine.speculating import at_random, scripted, whole
from tests.engine.test_gpu import prompts
from tests.helpers import dense_greedy, load_oracle

pytestmark = pytest.mark.gpu

ON_CUDA = {"model__device": "cuda", "model__dtype": "float32"}
GREEDY: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
MANY_WAYS: list[dict[str, Any]] = [
    {},
    {"kernels__enforce_eager": True},
    {"scheduler__max_num_batched_tokens": 33},
    {"cache__num_blocks": 40},
    {"cache__block_size": 1},
    {"scheduler__max_num_seqs": 3},
    {"kernels__batch_invariant": True},
    {"kernels__backend": "reference"},
]


@pytest.fixture
def gpu_host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    oracle = load_oracle(tiny_llama)
    return {key: dense_greedy(oracle, prompt, 20) for key, prompt in prompts().items()}


@pytest.mark.parametrize("overrides", MANY_WAYS, ids=str)
def test_drafts_right_and_wrong_leave_the_tokens_of_the_dense_model(
    gpu_host: EngineHost, tiny_llama: Path, expected: dict[str, list[int]], overrides: dict[str, Any]
) -> None:
    with scripted(gpu_host, tiny_llama, whole(prompts(), expected), at_random(1), **ON_CUDA, **overrides) as proposer:
        collected = answers(gpu_host, prompts(), **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
        assert sum(right for _, _, right in proposer.drafted) > 0


@pytest.mark.parametrize("own", [True, False], ids=["a model", "first layers"])
@pytest.mark.parametrize("overrides", MANY_WAYS[:4], ids=str)
def test_a_draft_model_on_the_card(
    gpu_host: EngineHost, tiny_llama: Path, expected: dict[str, list[int]], overrides: dict[str, Any], own: bool
) -> None:
    """The target itself as its draft is right but for near ties."""
    draft = {"speculative__model": str(tiny_llama)} if own else {}
    gpu_host.load(config_of(tiny_llama, speculative__method="draft_model", **draft, **ON_CUDA, **overrides))
    collected = answers(gpu_host, prompts(), **GREEDY)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    counts = [answer.last.speculation for answer in collected.values()]
    drafted, accepted = (sum(it[place] for it in counts if it) for place in (1, 2))
    assert drafted > 10  # a budget of 33 leaves few beside the prompts
    assert not own or accepted > 0.95 * drafted


def test_verification_is_a_graph_replay(
    gpu_host: EngineHost, tiny_llama: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from backend.models.triton_decoder import TritonDecoder

    calls: Counter[str] = Counter()
    forward = TritonDecoder.forward

    def counted(self: TritonDecoder, *args: Any) -> Any:
        calls["eager"] += 1
        return forward(self, *args)

    with scripted(gpu_host, tiny_llama, whole(prompts(), expected), at_random(1), **ON_CUDA) as proposer:
        monkeypatch.setattr(TritonDecoder, "forward", counted)
        collected = answers(gpu_host, prompts(), **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
        assert any(drafted for _, drafted, _ in proposer.drafted)
    assert not calls["eager"]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_batch_invariant_tokens_are_equal_bit_for_bit_speculated(
    gpu_host: EngineHost, tiny_llama: Path, method: str
) -> None:
    """bfloat16: alone and plain, then at once with drafts of which some are right and some are not."""
    settings = {"model__device": "cuda", "model__dtype": "bfloat16", "kernels__batch_invariant": True}
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    gpu_host.load(config_of(tiny_llama, **settings))
    alone = {key: answers(gpu_host, {key: prompt}, **options)[key].token_ids for key, prompt in prompts().items()}
    for overrides in ({}, {"scheduler__max_num_batched_tokens": 33}, {"kernels__enforce_eager": True}):
        gpu_host.load(
            config_of(tiny_llama, speculative__method=method, speculative__adaptive=False, **settings, **overrides)
        )
        collected = answers(gpu_host, prompts(), **options)
        assert {key: answer.token_ids for key, answer in collected.items()} == alone, overrides
        counts = [answer.last.speculation or (0, 0, 0) for answer in collected.values()]
        drafted, accepted = (sum(count[place] for count in counts) for place in (1, 2))
        assert 0 < accepted < drafted, overrides
