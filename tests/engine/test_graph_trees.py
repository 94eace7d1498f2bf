"""Rounds of draft trees in CUDA graphs, with stand-ins for them that are as strict: see `recorded_graphs`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.engine.engine_host import EngineHost
from backend.metrics.speculation_ledger import Round
from backend.models.sources import resolve_source
from backend.spec_decode.draft_tree import DEFAULT_TREES
from backend.spec_decode.heads.head_config import HeadKind
from backend.spec_decode.heads.target import DenseTarget
from backend.worker.decoders import ReferenceDecoder
from backend.worker.model_runner import ModelRunner
from backend.workload.targets import StreamEvent
from tests.engine.driving import Answer, Pausing, config_of, held, submit, submit_to
from tests.engine.few_tokens import GREEDY, PROMPTS
from tests.engine.heads import (
    KINDS,
    answers_and_rounds,
    before_verification,
    growing,
    heading,
    load_drafter,
    num_accepted,
    plant_paths,
    random_head,
    save,
)
from tests.engine.test_draft_trees import Drafted, check_trees
from tests.helpers import dense_greedy, make_tiny_model
from tests.spec_decode.tiny_heads import CPU

from backend.worker.tree_graphs import TreeGraphs  # isort: skip  # once the kernels are the interpreter's

SMALL: dict[str, Any] = {"model__max_model_len": 128, "scheduler__max_num_seqs": 7}
MATRIX: dict[str, dict[str, Any]] = {
    "as ever": {},
    # Chunks, and parts of trees behind which a larger one has no slots to be drafted ahead.
    "a budget of 32": {"scheduler__max_num_batched_tokens": 32, "cache__block_size": 1},
    "preempted": {"cache__num_blocks": 11, "scheduler__preemption": "recompute"},
    "two levels": {"speculative__num_speculative_tokens": 2},
}
OF_MEDUSA = ("as ever", "a budget of 32")
SHORT = {key: prompt for key, prompt in PROMPTS.items() if len(prompt) <= 40}  # all of them fit in a graph at once


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Every tree that graphs have verified."""
    found: list[Drafted] = []

    def watch(request_id: str, num_tokens: int, count: int, nodes: Tensor) -> None:
        found.append((request_id, num_tokens, count, nodes.tolist()))

    before_verification(monkeypatch, watch)
    return found


def without_graphs(monkeypatch: pytest.MonkeyPatch, graph_host: EngineHost, *args: Any, **kwargs: Any) -> None:
    """Load an engine as `host.load(growing(...))`."""
    graph_host.unload()
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "capture_cuda_graphs", lambda *args: None)
        graph_host.load(growing(*args, **kwargs))


def told(rounds: list[Round]) -> list[tuple[Any, ...]]:
    """All but when it was, and how long it took."""
    return sorted(
        (it.request_id, it.position, it.draft_token_ids, it.num_accepted, it.token_id, it.num_nodes, it.accept_probs)
        for it in rounds
    )


@pytest.mark.parametrize(
    ("kind", "name"), [*(("eagle", name) for name in MATRIX), *(("medusa", name) for name in OF_MEDUSA)]
)
def test_tokens_are_those_of_plain_decoding_and_trees_those_of_the_head_alone(
    graph_host: EngineHost,
    replays: Counter[str],
    few_tokens: Path,
    few_tokens_heads: dict[HeadKind, Path],
    few_tokens_greedy: dict[str, list[int]],
    verified: list[Drafted],
    kind: HeadKind,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is told of rounds is what is told without graphs, one by one."""
    options = {**SMALL, **MATRIX[name]}
    is_mixed = name in ("a budget of 32", "preempted")  # prompts beside drafts, which graphs do not take
    info = graph_host.load(growing(few_tokens, kind, few_tokens_heads[kind], **options))
    tree = info.resolved_config.speculative.draft_tree
    assert tree is not None
    with monkeypatch.context() as patch:
        if not is_mixed:
            patch.setattr(ReferenceDecoder, "forward", _refuse)
        collected, rounds = answers_and_rounds(graph_host, SHORT, **GREEDY)
    assert {key: answer.token_ids for key, answer in collected.items()} == {
        key: few_tokens_greedy[key] for key in SHORT
    }
    assert len(verified) >= (1 if is_mixed else len(rounds))
    assert num_accepted(rounds) > 20
    counts = {count for _, _, count, _ in verified}
    assert tree.num_drafted in counts or name == "a budget of 32"
    assert len(counts) > 1, "near the ends trees are cut"
    check_trees(load_drafter(few_tokens_heads[kind], few_tokens), SHORT, collected, verified[::3], tree)
    if name == "preempted":
        assert sum(answer.last.num_preemptions or 0 for answer in collected.values()) > 0
    if name != "as ever":
        return
    if kind == "eagle":
        assert replays["observe_graphs"] >= replays["decode_graphs"] + replays["mixed_graphs"] > 0
    before = replays.copy()
    without_graphs(monkeypatch, graph_host, few_tokens, kind, few_tokens_heads[kind], **options)
    _, expected = answers_and_rounds(graph_host, SHORT, **GREEDY)
    assert replays == before
    assert told(rounds) == told(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_tree_is_drafted_before_the_host_has_heard_of_this_one(
    graph_host: EngineHost,
    few_tokens: Path,
    few_tokens_heads: dict[HeadKind, Path],
    verified: list[Drafted],
    kind: HeadKind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But where its entries have had no slots: behind a part of a tree, while another request has the rest of the budget."""
    counts: Counter[str] = Counter()
    for name in ("draft", "verify", "go_on"):
        original = getattr(TreeGraphs, name)

        def counted(self: TreeGraphs, name: str = name, original: Any = original) -> Any:
            counts[name] += 1
            return original(self)

        monkeypatch.setattr(TreeGraphs, name, counted)
    budget = {"cache__block_size": 1, "scheduler__max_num_batched_tokens": 26}
    graph_host.load(growing(few_tokens, kind, few_tokens_heads[kind], **{**SMALL, **budget}))
    prompts = {key: PROMPTS[key] for key in ("p17", "p2")}
    with held(graph_host):
        collected = {
            key: submit(graph_host, key, prompt, max_tokens=8 if key == "p2" else 60, ignore_eos=True)
            for key, prompt in prompts.items()
        }
    assert all(answer.last.finish_reason == "length" for answer in collected.values())
    assert counts["verify"] == counts["go_on"] > 10
    assert counts["draft"] == (2 if kind == "eagle" else 1), "Medusa heads have no entries"
    sizes = [count for key, _, count, _ in verified if key == "p17"]
    assert max(sizes[:2]) == 12
    assert 25 in sizes
    tree, jump = DEFAULT_TREES[kind], sizes.index(25)
    assert jump > 0
    after = [each for each in verified if each[0] == "p17"][jump : jump + 2]
    check_trees(load_drafter(few_tokens_heads[kind], few_tokens), prompts, collected, [*verified[:2], *after], tree)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Mistral", {"sliding_window": 8}),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_windows(
    graph_host: EngineHost,
    replays: Counter[str],
    tmp_path: Path,
    architecture: str,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all layers, and of those behind the first one: two KV groups. Whole paths are accepted that were planted."""
    model = make_tiny_model(tmp_path / "model", architecture, **changes)
    target = DenseTarget.load(resolve_source(str(model)), CPU)
    head = save(tmp_path / "head", random_head("eagle", target), "eagle", model, torch.arange(512))
    prompts = {key: PROMPTS[key] for key in ("p1", "p16", "p40")}
    expected = {key: dense_greedy(model, prompt, 24) for key, prompt in prompts.items()}
    texts = {key: [*prompt, *expected[key]] for key, prompt in prompts.items()}
    plant_paths(monkeypatch, DEFAULT_TREES["eagle"], texts, (25, 8, 15, 3, 21))
    graph_host.load(growing(model, "eagle", head, **SMALL, cache__block_size=4))
    collected, rounds = answers_and_rounds(graph_host, prompts, **GREEDY)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert num_accepted(rounds) > 30
    assert replays["tree_graphs"] > 10


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_requests_get_the_tokens_of_plain_decoding(
    graph_host: EngineHost,
    replays: Counter[str],
    few_tokens: Path,
    few_tokens_heads: dict[HeadKind, Path],
    few_tokens_greedy: dict[str, list[int]],
    kind: HeadKind,
) -> None:
    """With their seeds and filters, beside greedy ones; nodes are accepted below the first level too."""
    filters: dict[str, dict[str, Any]] = {
        "p2": {"temperature": 0.8, "top_k": 20, "seed": 3},
        "p16": {"temperature": 0.5, "seed": 7},
        "p40": {"temperature": 1.2, "top_p": 0.8, "seed": 2**62 + 5},
    }

    def collect() -> dict[str, Answer]:
        with held(graph_host):
            collected = {
                key: submit(graph_host, key, PROMPTS[key], **GREEDY, **filters.get(key, {}))
                for key in ("p1", "p15", *filters)
            }
        assert all(answer.finish_reason == "length" for answer in collected.values())
        return collected

    graph_host.load(config_of(few_tokens, **SMALL))
    plain = {key: answer.token_ids for key, answer in collect().items()}
    assert all(plain[key] == few_tokens_greedy[key] for key in ("p1", "p15"))
    graph_host.load(growing(few_tokens, kind, few_tokens_heads[kind], **SMALL))
    collected = collect()
    assert {key: answer.token_ids for key, answer in collected.items()} == plain
    assert replays["tree_graphs"] > 5
    longest = max(len(event.token_ids) for key in filters for event in collected[key].events)
    assert longest > 2, "no second level was accepted"


@pytest.mark.parametrize("kind", KINDS)
def test_sd_5_trees_reach_to_the_end_of_the_context_and_not_beyond(
    graph_host: EngineHost, few_tokens: Path, few_tokens_heads: dict[HeadKind, Path], kind: HeadKind
) -> None:
    context = 64
    prompts = {key: PROMPTS["p100"][:length] for key, length in {"a": 38, "b": 57, "c": 60, "d": 62}.items()}
    graph_host.load(growing(few_tokens, kind, few_tokens_heads[kind], model__max_model_len=context))
    collected, rounds = answers_and_rounds(graph_host, prompts, max_tokens=50, ignore_eos=True)
    for key, prompt in prompts.items():
        assert collected[key].token_ids == dense_greedy(few_tokens, prompt, context - len(prompt))
        assert collected[key].finish_reason == "length"
    assert max(len(prompts[it.request_id]) + it.position + (it.num_nodes or 0) for it in rounds) == context


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a step has been launched op by op")


@pytest.mark.parametrize(
    ("kind", "tree", "block_size"), [("eagle", False, 1), ("eagle", True, 4), ("eagle", True, 16), ("medusa", True, 1)]
)
def test_plain_steps_go_on_into_blocks_that_rounds_have_left(
    graph_host: EngineHost,
    replays: Counter[str],
    few_tokens: Path,
    few_tokens_heads: dict[HeadKind, Path],
    kind: HeadKind,
    tree: bool,
    block_size: int,
) -> None:
    """Ahead of their tokens: a request drafts alone, until another comes and nobody does."""
    load, options = growing if tree else heading, {"cache__block_size": block_size, "speculative__max_batch": 1}
    graph_host.load(
        load(few_tokens, kind, few_tokens_heads[kind], **SMALL | {"scheduler__async_scheduling": True} | options)
    )
    prompts = {"first": PROMPTS["p16"], "second": PROMPTS["p2"]}
    expected = {key: dense_greedy(few_tokens, prompt, 70) for key, prompt in prompts.items()}
    first = _AfterSome(14)
    submit_to(first, graph_host, "first", prompts["first"], max_tokens=70, ignore_eos=True)
    with first.paused():
        second = submit(graph_host, "second", prompts["second"], max_tokens=70, ignore_eos=True)
    assert (first.finish_reason, second.finish_reason) == ("length", "length")
    assert {"first": first.token_ids, "second": second.token_ids} == expected
    assert replays["decode_graphs"] > 30


class _AfterSome(Pausing):
    """Pauses the engine once so many tokens are there."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def take(self, event: StreamEvent) -> None:
        if len(self.token_ids) < self._num_tokens:
            Answer.take(self, event)
        else:
            super().take(event)
