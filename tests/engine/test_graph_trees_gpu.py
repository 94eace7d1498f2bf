"""Rounds of draft trees in CUDA graphs, against the same engine without graphs; on a CPU test_graph_trees.py stands for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.core.speculative_scheduler import MAX_TREE_REQS
from backend.engine.engine_host import EngineHost
from backend.spec_decode.heads.head_config import HeadKind
from backend.worker.graph_rounds import GraphRounds
from tests.engine.driving import answers, config_of
from tests.engine.few_tokens import GREEDY, PROMPTS
from tests.engine.heads import KINDS, answers_and_rounds, growing, let_draft_only_where_graphs_do, num_accepted

pytestmark = pytest.mark.gpu

LOADS: list[dict[str, Any]] = [
    {},
    {"cache__block_size": 8, "scheduler__max_num_batched_tokens": 48},
    {"cache__num_blocks": 16},
    {"scheduler__max_num_seqs": 3},
    {"speculative__num_speculative_tokens": 3},
    {"speculative__max_batch": 2, "scheduler__max_num_seqs": 3},  # the last requests are few
    {"cache__dtype": "int8"},
]


@pytest.fixture(scope="module")
def gpu_host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


def options_of(load: dict[str, Any]) -> dict[str, Any]:
    return {"model__device": "cuda", "model__dtype": "float32", "speculative__adaptive": False} | load


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_rounds_are_those_without_graphs(
    gpu_host: EngineHost,
    few_tokens: Path,
    few_tokens_heads: dict[HeadKind, Path],
    kind: HeadKind,
    load: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32, where rounding decides hardly ever, round by round; twice, with and without a prefix in the cache."""
    let_draft_only_where_graphs_do(monkeypatch)
    seen = []
    for enforce_eager in (True, False):
        options = options_of(load) | {"kernels__enforce_eager": enforce_eager}
        gpu_host.load(growing(few_tokens, kind, few_tokens_heads[kind], **options))
        for _ in range(2):
            collected, rounds = answers_and_rounds(gpu_host, PROMPTS, **GREEDY)
            assert all(it.draft_ms >= 0 and it.verify_ms > 0 for it in rounds)
            assert num_accepted(rounds) > len(rounds) / 4
            told = sorted(
                (it.request_id, it.position, it.draft_token_ids, it.num_accepted, it.token_id, it.num_nodes)
                for it in rounds
            )
        seen.append(({key: answer.token_ids for key, answer in collected.items()}, told))
    (tokens, rounds), (tokens_in_graphs, rounds_in_graphs) = seen
    assert tokens_in_graphs == tokens
    if not load.get("cache__num_blocks"):  # else who is preempted may change with how far all are
        assert rounds_in_graphs == rounds


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_plain_decoding(
    gpu_host: EngineHost, few_tokens: Path, few_tokens_heads: dict[HeadKind, Path], kind: HeadKind
) -> None:
    gpu_host.load(config_of(few_tokens, model__device="cuda", model__dtype="float32"))
    plain = {key: answer.token_ids for key, answer in answers(gpu_host, PROMPTS, **GREEDY).items()}
    info = gpu_host.load(growing(few_tokens, kind, few_tokens_heads[kind], **options_of({})))
    assert any(f"without CUDA graphs in steps in which more than {MAX_TREE_REQS} " in notice for notice in info.notices)
    assert {key: answer.token_ids for key, answer in answers(gpu_host, PROMPTS, **GREEDY).items()} == plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_is_two_replays_and_nothing_in_it_waits(
    gpu_host: EngineHost,
    few_tokens: Path,
    few_tokens_heads: dict[HeadKind, Path],
    kind: HeadKind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But the first, which drafts for itself."""
    from backend.models.triton_decoder import TritonDecoder

    gpu_host.load(growing(few_tokens, kind, few_tokens_heads[kind], **options_of({})))
    calls: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    run = GraphRounds.run

    def watched(self: GraphRounds, *args: Any) -> Any:
        calls["rounds"] += 1
        replays = calls["replay"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = run(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        calls["replays of rounds"] += calls["replay"] - replays
        return pending

    monkeypatch.setattr(GraphRounds, "run", watched)
    count(torch.cuda.CUDAGraph, "replay")
    for name in ("forward", "run_layer"):
        count(TritonDecoder, name)
    answers(gpu_host, {"a": PROMPTS["p16"]}, max_tokens=60, ignore_eos=True)
    assert calls["rounds"] > 5
    assert calls["replays of rounds"] == 2 * calls["rounds"] + 1
    assert not calls["run_layer"]
    assert not calls["forward"]
