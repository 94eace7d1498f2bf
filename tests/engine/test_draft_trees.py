"""`speculative.tree` in a real engine: tokens are those of plain decoding, and trees are those of the head alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine.engine_host import EngineHost
from backend.models.sources import resolve_source
from backend.spec_decode.draft_tree import DEFAULT_TREES, DraftTree
from backend.spec_decode.heads.acceptance import Drafter
from backend.spec_decode.heads.head_config import HeadKind
from backend.spec_decode.heads.target import DenseTarget
from backend.spec_decode.proposer import DraftOutput, DraftRequest
from backend.spec_decode.tree_proposers import EagleTreeProposer
from tests.engine.driving import Answer, answers, config_of, tokens
from tests.engine.few_tokens import GREEDY, PROMPTS
from tests.engine.heads import (
    answers_and_rounds,
    before_verification,
    growing,
    load_drafter,
    num_accepted,
    plant_paths,
    random_head,
    save,
)
from tests.engine.test_samples import samples
from tests.helpers import dense_greedy, load_oracle, make_tiny_model
from tests.spec_decode.tiny_heads import (
    CPU,
    dense_ranking,
    dense_states,
)
from tests.worker.recorded_graphs import recorded_graphs


@pytest.fixture(autouse=True)
def check_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELAB_DEBUG", "1")


Drafted = tuple[str, int, int, list[int]]  # request, tokens it had, nodes it might have, all nodes


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Every tree of an EAGLE head, as it is drafted."""
    found: list[Drafted] = []
    propose = EagleTreeProposer.propose

    def watched(self: EagleTreeProposer, requests: Sequence[DraftRequest]) -> DraftOutput:
        output = propose(self, requests)
        rows = zip(requests, output.num_tokens, output.token_ids.tolist(), strict=True)
        found.extend((it.request_id, it.num_tokens, count, nodes) for it, count, nodes in rows if count)
        return output

    monkeypatch.setattr(EagleTreeProposer, "propose", watched)
    return found


def check_trees(
    drafter: Drafter,
    prompts: Mapping[str, Sequence[int]],
    collected: Mapping[str, Answer],
    drafted: Sequence[Drafted],
    tree: DraftTree,
) -> None:
    """Each node a request might have is the head's choice of its rank behind its own path, computed without any cache."""
    states = {key: dense_states(drafter, [*prompt, *collected[key].token_ids]) for key, prompt in prompts.items()}
    for request_id, num_known, count, nodes in drafted:
        text = [*prompts[request_id], *collected[request_id].token_ids]
        for parent in range(count):
            path = [node for node in range(1, parent + 1) if tree.masks[parent] >> node & 1]
            children = [child for child in tree.children[parent] if child <= count]
            if children:
                drafts = [nodes[node - 1] for node in path]
                ranked = dense_ranking(drafter, states[request_id], text, num_known, drafts, len(children))
                assert [nodes[child - 1] for child in children] == ranked


MATRIX: dict[str, dict[str, Any]] = {
    "blocks of one": {"cache__block_size": 1},
    "chunks": {"scheduler__max_num_batched_tokens": 40, "cache__block_size": 4},
    "a budget of three": {"scheduler__max_num_batched_tokens": 3},
    "off while more than one decodes": {"speculative__max_batch": 1, "scheduler__max_num_seqs": 2},
    "preempted": {"cache__num_blocks": 10, "scheduler__preemption": "recompute"},
    "swapped": {"cache__num_blocks": 10, "scheduler__preemption": "swap"},
    "contiguous": {"cache__layout": "contiguous"},
    "two levels": {"speculative__num_speculative_tokens": 2},
}
OF_MEDUSA = ("chunks", "preempted")


@pytest.mark.parametrize(
    ("kind", "name"), [*(("eagle", name) for name in MATRIX), *(("medusa", name) for name in OF_MEDUSA)]
)
def test_tokens_are_those_of_plain_decoding_and_trees_those_of_the_head_alone(
    host: EngineHost,
    few_tokens: Path,
    few_tokens_heads: dict[HeadKind, Path],
    few_tokens_greedy: dict[str, list[int]],
    drafted: list[Drafted],
    kind: HeadKind,
    name: str,
) -> None:
    """Twice: the second time much of each prompt is found in the cache, and with it what the head had computed of it."""
    info = host.load(growing(few_tokens, kind, few_tokens_heads[kind], **MATRIX[name]))
    tree = info.resolved_config.speculative.draft_tree
    assert tree is not None
    drafter = load_drafter(few_tokens_heads[kind], few_tokens)
    for turn in range(2):
        drafted.clear()
        collected, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == few_tokens_greedy, f"turn {turn}"
        assert len(rounds) >= 4
        assert num_accepted(rounds) > 0
        assert bool(drafted) == (kind == "eagle")
        check_trees(drafter, PROMPTS, collected, drafted[turn::14], tree)
        if name in ("preempted", "swapped"):
            assert sum(answer.last.num_preemptions or 0 for answer in collected.values()) > 0


def test_plain_steps_between_are_read_in_graphs(
    few_tokens: Path,
    few_tokens_heads: dict[HeadKind, Path],
    few_tokens_greedy: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that is alone has trees, and as long as it is not there are none."""
    small = {"model__max_model_len": 128, "scheduler__max_num_seqs": 7, "speculative__max_batch": 1}
    verified: list[Drafted] = []
    before_verification(monkeypatch, lambda *each: verified.append((*each[:3], each[3].tolist())))
    with recorded_graphs() as replays:
        host = EngineHost()
        host.load(growing(few_tokens, "eagle", few_tokens_heads["eagle"], **small))
        collected, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
        assert not verified
        alone, more = answers_and_rounds(host, {"p17": PROMPTS["p17"]}, **GREEDY)
        host.close()
    assert {key: answer.token_ids for key, answer in collected.items()} == few_tokens_greedy
    assert alone["p17"].token_ids == few_tokens_greedy["p17"]
    assert not rounds
    assert num_accepted(more) > 5
    assert len(verified) == len(more)
    assert replays["observe_graphs"] > 20
    check_trees(
        load_drafter(few_tokens_heads["eagle"], few_tokens),
        {"p17": PROMPTS["p17"]},
        alone,
        verified[:3],
        DEFAULT_TREES["eagle"],
    )


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Mistral", {"sliding_window": 8}),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_tokens_are_those_of_plain_decoding_with_windows(
    host: EngineHost, tmp_path: Path, architecture: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers, and those behind the first one: two KV groups. Drafts of a random head are seldom right: some are planted."""
    model = make_tiny_model(tmp_path / "model", architecture, **changes)
    target = DenseTarget.load(resolve_source(str(model)), CPU)
    head = save(tmp_path / "head", random_head("eagle", target), "eagle", model, torch.arange(512))
    oracle = load_oracle(model)
    expected = {key: dense_greedy(oracle, prompt, 24) for key, prompt in PROMPTS.items()}
    texts = {key: [*prompt, *expected[key]] for key, prompt in PROMPTS.items()}
    plant_paths(monkeypatch, DEFAULT_TREES["eagle"], texts, (25, 8, 15, 3, 21))
    host.load(growing(model, "eagle", head, cache__block_size=4, scheduler__max_num_batched_tokens=200))
    for _ in range(2):
        collected, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
        assert num_accepted(rounds) > 60


@pytest.mark.parametrize(("kind", "dtype"), [("eagle", "fp8_e4m3"), ("eagle", "int4"), ("medusa", "int8")])
def test_tokens_are_those_of_plain_decoding_over_a_quantized_cache(
    host: EngineHost, few_tokens: Path, few_tokens_heads: dict[HeadKind, Path], kind: HeadKind, dtype: str
) -> None:
    host.load(config_of(few_tokens, cache__dtype=dtype))
    plain = tokens(host, PROMPTS, **GREEDY)
    host.load(growing(few_tokens, kind, few_tokens_heads[kind], cache__dtype=dtype))
    for _ in range(2):
        collected, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == plain
        assert num_accepted(rounds) > 10


def test_samples_of_a_prompt_go_on_from_what_the_first_has_computed(
    host: EngineHost, few_tokens: Path, few_tokens_heads: dict[HeadKind, Path], few_tokens_greedy: dict[str, list[int]]
) -> None:
    """They share blocks, the last of which each copies before nodes are written into it."""
    host.load(growing(few_tokens, "eagle", few_tokens_heads["eagle"]))
    prompts = {key: PROMPTS[key] for key in ("p17", "p40")}
    alone = {key: answers(host, {key: prompt}, **GREEDY)[key].last.speculation for key, prompt in prompts.items()}
    for key, answer in samples(host, prompts, n=3, **GREEDY).items():
        assert answer.token_ids == few_tokens_greedy[key.split("/")[0]]
        assert answer.last.speculation == alone[key.split("/")[0]]
