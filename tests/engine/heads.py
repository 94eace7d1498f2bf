"""Draft heads in a real engine, and what they draft there against what they draft alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.metrics.speculation_ledger import Round, read_rounds
from backend.models.sources import resolve_source
from backend.spec_decode.draft_tree import DraftTree
from backend.spec_decode.heads.acceptance import Drafter
from backend.spec_decode.heads.head_config import HeadConfig, HeadKind
from backend.spec_decode.heads.head_file import load_head, save_head
from backend.spec_decode.heads.target import DenseTarget, target_fingerprint
from backend.spec_decode.heads.training import HeadTrainer, TrainingSettings, new_head
from backend.spec_decode.heads.training_data import Conversation
from backend.spec_decode.heads.unroll import DraftHead
from backend.spec_decode.proposer import DraftOutput, DraftRequest
from backend.spec_decode.tree_proposers import EagleTreeProposer
from backend.worker.draft_model_runner import DraftModelRunner
from backend.worker.speculative_batch import RoundInput
from tests.engine.driving import Answer, answers, config_of
from tests.engine.test_engine_host import StepSink
from tests.interpreter import interpret_without_cuda
from tests.spec_decode.tiny_heads import (
    CPU,
    FEATURE_LAYERS,
    dense_chain,
    dense_states,
    make_target,
    random_eagle,
    random_medusa,
)

KINDS: tuple[HeadKind, ...] = ("eagle", "medusa")
NUM_HEADS = 4  # of a Medusa
TRAINING = TrainingSettings(num_steps=24, num_unrolled=2, batch_tokens=512, learning_rate=4e-3, seed=0)


def let_draft_only_where_graphs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines without graphs leave out the drafts that one with graphs leaves out: then steps are the same ones."""
    cost = DraftModelRunner.cost.fget
    assert cost is not None
    monkeypatch.setattr(DraftModelRunner, "cost", property(lambda runner: replace(cost(runner), only_in_graphs=True)))


def random_head(kind: HeadKind, target: DenseTarget, feature_layers: Sequence[int] = FEATURE_LAYERS) -> DraftHead:
    return random_eagle(target, len(feature_layers)) if kind == "eagle" else random_medusa(target, NUM_HEADS)


def make_few_tokens(folder: Path, vocab_size: int) -> Path:
    """A model of few tokens, which a head can learn in a moment."""
    make_target(folder, vocab_size)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = tokenizer["added_tokens"]
    for token_id, token in enumerate(special, start=vocab_size - len(special)):
        token["id"] = token_id
    letters = {token: at for token, at in tokenizer["model"]["vocab"].items() if at < vocab_size - len(special)}
    tokenizer["model"]["vocab"] = letters
    path.write_text(json.dumps(tokenizer))
    return folder


def save(
    folder: Path,
    head: DraftHead,
    kind: HeadKind,
    model: Path,
    vocabulary: Tensor,
    feature_layers: Sequence[int] = FEATURE_LAYERS,
) -> Path:
    """A head's folder, for the target of another one."""
    layers = tuple(feature_layers) if kind == "eagle" else ()
    fingerprint = target_fingerprint(resolve_source(str(model)))
    save_head(folder, head, HeadConfig(kind, "tiny", fingerprint, NUM_HEADS, layers, len(vocabulary), {}), vocabulary)
    return folder


def trained_head(
    folder: Path,
    kind: HeadKind,
    model: Path,
    target: DenseTarget,
    conversations: Sequence[Conversation],
    vocabulary: Tensor,
) -> Path:
    """The folder of a head that has learnt for a moment."""
    layers = FEATURE_LAYERS if kind == "eagle" else ()
    trainer = HeadTrainer(new_head(random_head(kind, target), target, 0), target, layers, vocabulary, TRAINING)
    assert trainer.train(conversations)
    return save(folder, trainer.head, kind, model, vocabulary)


def heading(model: Path, kind: str, head: Path, **overrides: Any) -> EngineConfig:
    return config_of(model, speculative__method=kind, speculative__model=str(head), **overrides)


def growing(model: Path, kind: str, head: Path, **overrides: Any) -> EngineConfig:
    """As `heading`, with trees."""
    return heading(model, kind, head, speculative__tree=True, **overrides)


def load_drafter(head: Path, model: Path) -> Drafter:
    source = resolve_source(str(model))
    target = DenseTarget.load(source, CPU)
    loaded = load_head(head, target.config, target_fingerprint(source), dtype=torch.float32, device=CPU)
    return Drafter.of(loaded.head, target, loaded.config.feature_layers, loaded.draft_token_ids)


def plant_paths(
    monkeypatch: pytest.MonkeyPatch, tree: DraftTree, texts: Mapping[str, Sequence[int]], ends: Sequence[int]
) -> None:
    """Random EAGLE heads guess nothing: on the path to one of these nodes, in turn, the texts' own tokens stand for it."""
    propose = EagleTreeProposer.propose

    def plant(nodes: Tensor, request_id: str, num_tokens: int) -> None:
        end = ends[num_tokens % len(ends)]
        path = [node for node in range(1, len(tree)) if tree.masks[end] >> node & 1]
        for node, token_id in zip(path, texts[request_id][num_tokens:], strict=False):
            nodes[node - 1] = token_id

    def planted(self: EagleTreeProposer, requests: Sequence[DraftRequest]) -> DraftOutput:
        output = propose(self, requests)
        for nodes, it in zip(output.token_ids, requests, strict=True):
            plant(nodes, it.request_id, it.num_tokens)
        return output

    def planted_in_graphs(request_id: str, num_tokens: int, count: int, nodes: Tensor) -> None:
        plant(nodes, request_id, num_tokens)

    monkeypatch.setattr(EagleTreeProposer, "propose", planted)
    before_verification(monkeypatch, planted_in_graphs)


def before_verification(monkeypatch: pytest.MonkeyPatch, handle: Callable[[str, int, int, Tensor], None]) -> None:
    """Gets, of each request with drafts in a round of `TreeGraphs`, how many tokens it has, how many nodes it may have, and all
    of them, int64 [num_drafted], as they are about to be verified, perhaps with others in their place."""
    interpret_without_cuda()
    from backend.worker.tree_graphs import TreeGraphs

    start, verify = TreeGraphs.start, TreeGraphs.verify
    steps: list[RoundInput] = []

    def started(self: TreeGraphs, step: RoundInput, *args: Any) -> int:
        steps[:] = [step]
        return start(self, step, *args)

    def watched(self: TreeGraphs) -> tuple[Tensor, tuple[int, int]]:
        step = steps[0]
        rows = zip(step.request_ids, step.num_computed.tolist(), step.num_draft_tokens.tolist(), step.rows, strict=True)
        for request_id, num_computed, count, row in rows:
            if count:
                handle(request_id, num_computed + 1, count, self.drafts[row])
        return verify(self)

    monkeypatch.setattr(TreeGraphs, "start", started)
    monkeypatch.setattr(TreeGraphs, "verify", watched)


class _Rounds(StepSink):
    def all(self) -> list[Round]:
        return [it for kind, data, _, _ in self.chunks if kind == "speculation" for it in read_rounds(data)]


def answers_and_rounds(
    host: EngineHost, prompts: Mapping[str, Sequence[int]], **sampling: Any
) -> tuple[dict[str, Answer], list[Round]]:
    return rounds_of(host, lambda: answers(host, prompts, **sampling))


def rounds_of(host: EngineHost, collect: Callable[[], dict[str, Answer]]) -> tuple[dict[str, Answer], list[Round]]:
    """What comes of it, and the rounds that are recorded meanwhile."""
    sink = _Rounds()
    host.set_sink(sink)  # type: ignore[arg-type]
    collected = collect()
    host.set_sink(None)
    return collected, sink.all()


def check_drafts(
    drafter: Drafter,
    prompts: Mapping[str, Sequence[int]],
    collected: Mapping[str, Answer],
    rounds: Sequence[Round],
    window: int | None = None,
) -> None:
    """Drafts are those of the head alone, over the request's tokens so far, without a cache.

    Args:
        window: of the head's attention, in tokens; None: it has none.
    """
    for request_id, prompt in prompts.items():
        text = [*prompt, *collected[request_id].token_ids]
        states = dense_states(drafter, text)
        for it in (each for each in rounds if each.request_id == request_id):
            num_known, k = len(prompt) + it.position, len(it.draft_token_ids)
            assert list(it.draft_token_ids) == dense_chain(drafter, states, text, num_known, k, window), it


def num_accepted(rounds: Sequence[Round]) -> int:
    return sum(it.num_accepted for it in rounds)


def num_drafted(rounds: Sequence[Round]) -> int:
    return sum(len(it.draft_token_ids) for it in rounds)
