"""Rounds of draft trees in a real engine: what is told of them, where they end, and when there are none."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.errors import ConfigError
from backend.models.sources import resolve_source
from backend.spec_decode.draft_tree import DEFAULT_TREES
from backend.spec_decode.heads.head_config import HeadConfig, HeadKind
from backend.spec_decode.heads.head_file import save_head
from backend.spec_decode.heads.target import DenseTarget, target_fingerprint
from tests.engine.driving import Answer, config_of, held, submit
from tests.engine.few_tokens import GREEDY, PROMPTS, VOCAB_SIZE, VOCABULARY
from tests.engine.heads import (
    KINDS,
    answers_and_rounds,
    growing,
    heading,
    num_accepted,
    random_head,
    save,
)
from tests.engine.test_samples import submit_samples
from tests.engine.test_speculative_sampling import LENGTH, TEMPERATURE, TOP_K, chi_square, law_of, too_large
from tests.engine.test_speculative_sampling import PROMPT as SAMPLED_PROMPT
from tests.helpers import dense_greedy
from tests.spec_decode.tiny_heads import (
    CPU,
    random_medusa,
)


@pytest.fixture(autouse=True)
def check_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELAB_DEBUG", "1")


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_tells_the_path_that_was_accepted_and_how_many_nodes_were_drafted(
    host: EngineHost,
    few_tokens: Path,
    few_tokens_heads: dict[HeadKind, Path],
    few_tokens_greedy: dict[str, list[int]],
    kind: HeadKind,
) -> None:
    host.load(growing(few_tokens, kind, few_tokens_heads[kind]))
    collected, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
    tree = DEFAULT_TREES[kind]
    assert max(it.num_nodes or 0 for it in rounds) == tree.num_drafted
    for key, answer in collected.items():
        of_one = [it for it in rounds if it.request_id == key]
        for it in of_one:
            path, refused = it.draft_token_ids[: it.num_accepted], it.draft_token_ids[it.num_accepted :]
            assert list(path) == few_tokens_greedy[key][it.position :][: len(path)]
            following = few_tokens_greedy[key][it.position + len(path)]
            assert it.token_id == following
            assert len(refused) <= 1
            assert following not in refused
            assert len(it.draft_token_ids) <= tree.depth
            assert it.accept_probs == (1.0,) * len(path) + (0.0,) * len(refused)
            assert all(0 < probability <= 1 for probability in it.target_probs)
        origins = Counter(origin for event in answer.events for origin in event.origins or [])
        refused = sum(len(it.draft_token_ids) > it.num_accepted for it in of_one)
        assert origins["recovered"] == refused
        assert origins["recovered"] + origins["bonus"] == len(of_one)
        counts = answer.last.speculation
        assert counts is not None
        assert counts.num_rounds == len(of_one)
        assert counts.num_accepted_tokens == origins["accepted"] == num_accepted(of_one)
        assert counts.num_draft_tokens == num_accepted(of_one) + refused
        assert sum(origins.values()) == 24
    branches = [it for it in rounds if it.num_accepted and it.num_accepted < len(it.draft_token_ids)]
    assert len(branches) > 5


def test_more_is_accepted_than_of_chains(
    host: EngineHost, few_tokens: Path, few_tokens_heads: dict[HeadKind, Path]
) -> None:
    """A chain is the first path of its tree, and wherever it is accepted so is that."""
    for kind in KINDS:
        lengths = []
        depth = DEFAULT_TREES[kind].depth
        for tree in (False, True):
            options = {"speculative__tree": tree, "speculative__num_speculative_tokens": depth}
            host.load(heading(few_tokens, kind, few_tokens_heads[kind], **options))
            _, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
            lengths.append(num_accepted(rounds) / len(rounds))
        assert lengths[1] > lengths[0] + 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_stops_on_an_accepted_path(
    host: EngineHost,
    few_tokens: Path,
    few_tokens_heads: dict[HeadKind, Path],
    few_tokens_greedy: dict[str, list[int]],
    kind: HeadKind,
) -> None:
    """SD-1, at every place of an answer: nothing behind the stop is delivered or counted."""
    host.load(growing(few_tokens, kind, few_tokens_heads[kind]))
    within = 0
    for key in ("p16", "p40"):
        for stop in dict.fromkeys(few_tokens_greedy[key]):
            options = {"max_tokens": 24, "ignore_eos": True, "stop_token_ids": [stop]}
            collected, rounds = answers_and_rounds(host, {key: PROMPTS[key]}, **options)
            assert collected[key].token_ids == few_tokens_greedy[key][: few_tokens_greedy[key].index(stop)]
            assert collected[key].finish_reason == "stop"
            counts = collected[key].last.speculation
            assert counts is not None
            assert counts.num_accepted_tokens == sum(min(it.num_accepted, it.num_emitted) for it in rounds)
            within += any(it.num_emitted < it.num_accepted for it in rounds)
    assert within > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_greedy_and_sampled_requests_and_banned_ids(
    host: EngineHost,
    few_tokens: Path,
    few_tokens_heads: dict[HeadKind, Path],
    few_tokens_greedy: dict[str, list[int]],
    kind: HeadKind,
) -> None:
    """Each has its own way in the same step: those that draw leave the others alone, and stops come when they may."""
    stops = {key: sorted(set(few_tokens_greedy[key][:6])) for key in ("p16", "p40")}

    def run(config: EngineConfig) -> dict[str, Answer]:
        host.load(config)
        with held(host):
            collected = {key: submit(host, key, PROMPTS[key], **GREEDY) for key in ("p15", "p100")}
            for key, ids in stops.items():
                options = {"max_tokens": 24, "ignore_eos": True, "stop_token_ids": ids, "min_tokens": 9}
                collected[key] = submit(host, key, PROMPTS[key], **options)
            sampled = [submit(host, key, PROMPTS[key], temperature=1.2, seed=3, **GREEDY) for key in ("p2", "p17")]
        for answer in (*collected.values(), *sampled):
            assert answer.last.error is None
        return collected

    plain = {key: answer.token_ids for key, answer in run(config_of(few_tokens)).items()}
    collected = run(growing(few_tokens, kind, few_tokens_heads[kind]))
    assert {key: answer.token_ids for key, answer in collected.items()} == plain
    assert sum(it.last.speculation.num_accepted_tokens for it in collected.values() if it.last.speculation) > 10
    assert all(len(plain[key]) >= 9 and not set(plain[key][:9]) & set(ids) for key, ids in stops.items())
    assert plain["p15"] == few_tokens_greedy["p15"]


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_outputs_have_the_law_of_the_dense_model(
    host: EngineHost, few_tokens: Path, few_tokens_heads: dict[HeadKind, Path], kind: HeadKind
) -> None:
    law, counts = law_of(few_tokens), Counter[tuple[int, ...]]()
    host.load(
        growing(
            few_tokens, kind, few_tokens_heads[kind], scheduler__max_num_seqs=64, scheduler__max_num_batched_tokens=4096
        )
    )
    accepted = num_rounds = 0
    sampling = {"temperature": TEMPERATURE, "top_k": TOP_K, "max_tokens": LENGTH, "ignore_eos": True}
    for seed in range(8):
        for answer in submit_samples(host, "a", SAMPLED_PROMPT, 64, seed=seed, **sampling).values():
            assert answer.finish_reason == "length"
            assert answer.last.speculation is not None
            counts[tuple(answer.token_ids)] += 1
            accepted += answer.last.speculation.num_accepted_tokens
            num_rounds += answer.last.speculation.num_rounds
    assert set(counts) <= set(law)
    assert accepted > num_rounds / 3
    statistic, degrees = chi_square(counts, law)
    assert degrees > 20
    assert statistic < too_large(degrees)


@pytest.mark.parametrize("kind", KINDS)
def test_sd_5_the_end_of_the_context(host: EngineHost, tmp_path: Path, few_tokens: Path, kind: HeadKind) -> None:
    """The few_tokens's own, behind which there are no positions: nodes have slots before it and no level reaches it."""
    short = shutil.copytree(few_tokens, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    target = DenseTarget.load(resolve_source(str(short)), CPU)
    folder = save(tmp_path / "head", random_head(kind, target), kind, short, VOCABULARY)
    prompts = {f"p{length}": [7] * length for length in (100, 119, 122, 126)}
    host.load(growing(short, kind, folder))
    collected, rounds = answers_and_rounds(host, prompts, max_tokens=50, ignore_eos=True)
    for key, prompt in prompts.items():
        answer = collected[key]
        assert (len(prompt) + len(answer.token_ids), answer.finish_reason) == (128, "length")
        assert answer.token_ids == dense_greedy(few_tokens, prompt, len(answer.token_ids))
    ends = [len(prompts[it.request_id]) + it.position + (it.num_nodes or 0) for it in rounds]
    assert max(ends) == 128


def test_sd_7_a_tree_is_cut_to_the_heads_there_are(host: EngineHost, tmp_path: Path, few_tokens: Path) -> None:
    source = resolve_source(str(few_tokens))
    target = DenseTarget.load(source, CPU)
    config = HeadConfig("medusa", "tiny", target_fingerprint(source), 2, (), VOCAB_SIZE, {})
    save_head(tmp_path / "head", random_medusa(target, 2), config, torch.arange(VOCAB_SIZE))
    info = host.load(growing(few_tokens, "medusa", tmp_path / "head"))
    assert any("num_speculative_tokens is 2 instead of 5" in notice for notice in info.notices)
    assert any("trees of 25 tokens, 2 of them in a row at most" in notice for notice in info.notices)
    _, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
    assert max(it.num_nodes or 0 for it in rounds) == DEFAULT_TREES["medusa"].cut(2).num_drafted == 25
    assert max(len(it.draft_token_ids) for it in rounds) == 2


def test_where_it_loses_it_is_off(host: EngineHost, few_tokens: Path, few_tokens_heads: dict[HeadKind, Path]) -> None:
    """A CPU computes every node: a level of it costs more than it can bring."""
    info = host.load(growing(few_tokens, "eagle", few_tokens_heads["eagle"], speculative__adaptive=True))
    said = next(notice for notice in info.notices if "It begins switched off" in notice)
    assert "a whole one of 25 tokens costs about" in said
    _, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
    assert {it.num_nodes for it in rounds} <= {5}, "a level, to see"


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model", "lookahead"])
def test_trees_of_others_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="tree = True belongs to method = 'eagle' or 'medusa'"):
        config_of("dummy:tiny", speculative__method=method, speculative__tree=True)


def test_trees_are_refused_where_sums_must_not_depend_on_the_batch(
    host: EngineHost, few_tokens: Path, few_tokens_heads: dict[HeadKind, Path]
) -> None:
    with pytest.raises(ConfigError, match=r"speculative.tree = True does not go together with kernels.batch_invariant"):
        host.load(growing(few_tokens, "eagle", few_tokens_heads["eagle"], kernels__batch_invariant=True))
