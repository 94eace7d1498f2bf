"""`speculative.method = eagle` and `medusa`: tokens are those of plain decoding, and drafts are those of the head alone."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.core.kv_groups import KVGroupSpec
from backend.engine.engine_host import EngineHost
from backend.errors import ConfigError, ModelError
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.pool_history import PoolHistory
from backend.models.sources import resolve_source
from backend.spec_decode.heads.head_config import HeadKind
from backend.spec_decode.heads.target import DenseTarget
from tests.engine.driving import answers, config_of, tokens
from tests.engine.few_tokens import GREEDY, PROMPTS, VOCAB_SIZE, VOCABULARY
from tests.engine.heads import (
    KINDS,
    NUM_HEADS,
    answers_and_rounds,
    check_drafts,
    heading,
    load_drafter,
    make_few_tokens,
    num_accepted,
    num_drafted,
    random_head,
    save,
    trained_head,
)
from tests.engine.test_engine_host import StepSink
from tests.engine.test_samples import samples, submit_samples
from tests.engine.test_speculation import follow_pool
from tests.engine.test_speculative_sampling import LENGTH, TEMPERATURE, TOP_K, chi_square, law_of, too_large
from tests.engine.test_speculative_sampling import PROMPT as SAMPLED_PROMPT
from tests.helpers import dense_greedy, load_oracle, make_tiny_llama, make_tiny_model
from tests.spec_decode.tiny_heads import CPU, greedy_conversations
from tests.worker.recorded_graphs import recorded_graphs

from backend.worker.decode_graphs import DecodeGraphs  # isort: skip  # once the kernels are the interpreter's
from backend.worker.graph_rounds import GraphRounds  # isort: skip  # once the kernels are the interpreter's

Heads = dict[tuple[HeadKind, str], Path]  # by kind, and "random" or "trained"


@pytest.fixture(autouse=True)
def check_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELAB_DEBUG", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_few_tokens(tmp_path_factory.mktemp("models") / "few-tokens", VOCAB_SIZE)


@pytest.fixture(scope="module")
def target(model: Path) -> DenseTarget:
    return DenseTarget.load(resolve_source(str(model)), CPU)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    oracle = load_oracle(model)
    return {key: dense_greedy(oracle, prompt, 24) for key, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, model: Path, target: DenseTarget) -> Heads:
    folder, conversations = tmp_path_factory.mktemp("heads"), greedy_conversations(model, VOCAB_SIZE, 64)
    found: Heads = {}
    for kind in KINDS:
        head = random_head(kind, target)
        found[kind, "random"] = save(folder / f"random-{kind}", head, kind, model, VOCABULARY)
        place = folder / f"trained-{kind}"
        found[kind, "trained"] = trained_head(place, kind, model, target, conversations, VOCABULARY)
    return found


MATRIX: dict[str, dict[str, Any]] = {
    "blocks of one": {"cache__block_size": 1},
    "chunks": {"scheduler__max_num_batched_tokens": 16, "cache__block_size": 4},
    "a budget of three": {"scheduler__max_num_batched_tokens": 3},
    "off while more than one decodes": {"speculative__max_batch": 1, "scheduler__max_num_seqs": 2},
    "preempted": {"cache__num_blocks": 10, "scheduler__preemption": "recompute"},
    "swapped": {"cache__num_blocks": 10, "scheduler__preemption": "swap"},
    "contiguous": {"cache__layout": "contiguous"},
    "without prefix cache": {"cache__enable_prefix_caching": False},
    "batch invariant": {"kernels__batch_invariant": True},
}
OF_MEDUSA = ("chunks", "off while more than one decodes", "preempted", "swapped")


@pytest.mark.parametrize(
    ("kind", "name"), [*(("eagle", name) for name in MATRIX), *(("medusa", name) for name in OF_MEDUSA)]
)
def test_tokens_are_those_of_plain_decoding_and_drafts_those_of_the_head_alone(
    host: EngineHost, model: Path, heads: Heads, expected: dict[str, list[int]], kind: HeadKind, name: str
) -> None:
    """Twice: the second time much of each prompt is found in the cache, and with it what the head had computed of it."""
    folder = heads[kind, "trained"]
    host.load(heading(model, kind, folder, **MATRIX[name]))
    drafter = load_drafter(folder, model)
    for turn in range(2):
        collected, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected, f"turn {turn}"
        assert len(rounds) >= 5
        assert num_accepted(rounds) > 0
        check_drafts(drafter, PROMPTS, collected, rounds[turn::3])
        if name in ("preempted", "swapped"):
            assert sum(answer.last.num_preemptions or 0 for answer in collected.values()) > 0


@pytest.mark.parametrize(("kind", "block_size"), [("eagle", 1), ("eagle", 4), ("eagle", 16), ("medusa", 4)])
def test_drafts_in_graphs_are_those_of_the_head_alone_where_many_are_accepted(
    model: Path,
    heads: Heads,
    expected: dict[str, list[int]],
    kind: HeadKind,
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those that are made of the round before, while their requests' blocks end here and there, and those of rounds that
    begin before the last one is known."""
    folder, small = heads[kind, "trained"], {"model__max_model_len": 128, "scheduler__max_num_seqs": 7}
    num_repeated = count_repeats(monkeypatch)
    with recorded_graphs() as replays:
        host = EngineHost()
        options: dict[str, Any] = {"cache__block_size": block_size, "scheduler__async_scheduling": True, **small}
        host.load(heading(model, kind, folder, **options))
        collected, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
        host.close()
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    assert num_accepted(rounds) > 20
    check_drafts(load_drafter(folder, model), PROMPTS, collected, rounds)
    assert replays["round_graphs"] > 20
    assert num_repeated() > 0


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_head_reads_plain_steps_that_go_on_by_themselves(
    model: Path, heads: Heads, expected: dict[str, list[int]], kind: HeadKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longer prompt is the later one to decode: both do so without drafts, and then it is alone, and has some."""
    folder, pair = heads[kind, "trained"], {key: PROMPTS[key] for key in ("p1", "p100")}
    small = {"model__max_model_len": 128, "scheduler__max_num_seqs": 2, "scheduler__max_num_batched_tokens": 12}
    calls, replay_again = [], DecodeGraphs.replay_again

    def counted(*args: Any) -> Any:
        calls.append(args)
        return replay_again(*args)

    monkeypatch.setattr(DecodeGraphs, "replay_again", counted)
    with recorded_graphs():
        host = EngineHost()
        host.load(heading(model, kind, folder, speculative__max_batch=1, cache__block_size=4, **small))
        collected, rounds = answers_and_rounds(host, pair, **GREEDY)
        host.close()
    assert {key: answer.token_ids for key, answer in collected.items()} == {key: expected[key] for key in pair}
    assert len(calls) > 5
    later = [it for it in rounds if it.request_id == "p100"]
    assert later
    check_drafts(load_drafter(folder, model), pair, collected, later)


def test_key_frames_of_rounds_that_begin_before_the_last_one_is_known_have_what_it_accepted(
    model: Path, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens in blocks, step by step: with a key frame for every step as without any but the first."""
    num_repeated = count_repeats(monkeypatch)
    options: dict[str, Any] = {"cache__block_size": 4, "cache__num_blocks": 60, "model__max_model_len": 128}
    seen = []
    for key_frame_steps in (1, 1000):
        monkeypatch.setattr("backend.engine.step_recorder.KEY_FRAME_STEPS", key_frame_steps)
        sink = StepSink()
        with recorded_graphs():
            host = EngineHost()
            host.load(heading(model, "eagle", heads["eagle", "trained"], scheduler__async_scheduling=True, **options))
            host.set_sink(sink)  # type: ignore[arg-type]
            answers(host, dict([next(iter(PROMPTS.items()))]), max_tokens=90, ignore_eos=True)
            host.set_sink(None)
            host.close()
        follow_pool(sink, 60, 4)
        chunks = [(data, first, last) for kind, data, first, last in sink.chunks if kind == "steps"]
        # Read anew for each step, so that it is its own key frame that tells.
        moments = [PoolHistory(LedgerReader(chunks), 4).at(step.step) for step in sink.steps]
        seen.append([moment.num_tokens for moment in moments if moment is not None])
    assert num_repeated() > 10
    assert seen[0] == seen[1]


def count_repeats(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many rounds have begun before the one before them was known."""
    calls, repeat = [], GraphRounds.repeat

    def counted(*args: Any) -> Any:
        calls.append(args)
        return repeat(*args)

    monkeypatch.setattr(GraphRounds, "repeat", counted)
    return lambda: len(calls)


@pytest.mark.parametrize(
    ("architecture", "changes", "window"),
    [
        ("Mistral", {"sliding_window": 8}, 8),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, None),
    ],
)
def test_a_head_sees_as_far_as_the_target_s_first_kv_group(
    host: EngineHost, tmp_path: Path, architecture: str, changes: dict[str, Any], window: int | None
) -> None:
    """Where all layers have a window, blocks behind it are gone for the head too; else it sees everything."""
    model = make_tiny_model(tmp_path / "model", architecture, **changes)
    vocabulary = torch.arange(0, 512, 3)
    target = DenseTarget.load(resolve_source(str(model)), CPU)
    head = save(tmp_path / "head", random_head("eagle", target), "eagle", model, vocabulary)
    host.load(config_of(model, cache__block_size=4))
    plain = tokens(host, PROMPTS, **GREEDY)
    host.load(heading(model, "eagle", head, cache__block_size=4, scheduler__max_num_batched_tokens=40))
    collected, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
    assert {key: answer.token_ids for key, answer in collected.items()} == plain
    check_drafts(load_drafter(head, model), PROMPTS, collected, rounds[::8], window)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_prompt_go_on_from_what_the_first_has_computed(
    host: EngineHost, model: Path, heads: Heads, expected: dict[str, list[int]], kind: HeadKind
) -> None:
    """They share blocks, the last of which each copies before the head writes into it. Greedy, so all are alike."""
    host.load(heading(model, kind, heads[kind, "trained"]))
    prompts = {key: PROMPTS[key] for key in ("p17", "p40")}
    alone = {key: answers(host, {key: prompt}, **GREEDY)[key].last.speculation for key, prompt in prompts.items()}
    for key, answer in samples(host, prompts, n=3, **GREEDY).items():
        assert answer.token_ids == expected[key.split("/")[0]]
        assert answer.last.speculation == alone[key.split("/")[0]], "other drafts than those of a request alone"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle", {"cache__dtype": "fp8_e4m3"}),
        ("eagle", {"cache__dtype": "int4"}),
        ("medusa", {"cache__dtype": "int8"}),
        ("eagle", {"quantization__method": "int8"}),
        ("medusa", {"quantization__method": "int4"}),
    ],
    ids=str,
)
def test_tokens_are_those_of_plain_decoding_where_weights_or_cache_are_quantized(
    host: EngineHost, model: Path, heads: Heads, kind: HeadKind, options: dict[str, Any]
) -> None:
    host.load(config_of(model, **options))
    plain = tokens(host, PROMPTS, **GREEDY)
    host.load(heading(model, kind, heads[kind, "trained"], **options))
    for _ in range(2):
        collected, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == plain
        assert num_accepted(rounds) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_head_is_right_more_often_than_an_untrained_one(
    host: EngineHost, tmp_path: Path, model: Path, heads: Heads, kind: HeadKind
) -> None:
    """In the same folder: an engine is loaded anew when the files of its head change."""
    shares, folder = [], tmp_path / "head"
    for state in ("random", "trained"):
        folder.mkdir(exist_ok=True)
        for path in heads[kind, state].iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        host.load(heading(model, kind, folder))
        _, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
        shares.append(num_accepted(rounds) / num_drafted(rounds))
    assert shares[1] > shares[0] + 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_outputs_have_the_law_of_the_dense_model(
    host: EngineHost, model: Path, heads: Heads, kind: HeadKind
) -> None:
    law = law_of(model)
    options = {"scheduler__max_num_seqs": 64, "speculative__num_speculative_tokens": 2}
    host.load(heading(model, kind, heads[kind, "trained"], **options))
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0
    sampling = {"temperature": TEMPERATURE, "top_k": TOP_K, "max_tokens": LENGTH, "ignore_eos": True}
    for seed in range(12):
        for answer in submit_samples(host, "a", SAMPLED_PROMPT, 64, seed=seed, **sampling).values():
            assert answer.finish_reason == "length"
            assert answer.last.speculation is not None
            counts[tuple(answer.token_ids)] += 1
            drafted += answer.last.speculation.num_draft_tokens
            accepted += answer.last.speculation.num_accepted_tokens
    assert set(counts) <= set(law)
    assert 100 < accepted < drafted
    statistic, degrees = chi_square(counts, law)
    assert degrees > 20
    assert statistic < too_large(degrees)


@pytest.mark.parametrize("kind", KINDS)
def test_sd_5_the_end_of_the_context(host: EngineHost, tmp_path: Path, model: Path, kind: HeadKind) -> None:
    """The model's own, behind which there are no positions; one token of the room left is the target's."""
    short = shutil.copytree(model, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    target = DenseTarget.load(resolve_source(str(short)), CPU)
    folder = save(tmp_path / "head", random_head(kind, target), kind, short, VOCABULARY)
    prompts = {f"p{length}": [7] * length for length in (119, 122, 126)}
    host.load(heading(short, kind, folder))
    collected, rounds = answers_and_rounds(host, prompts, max_tokens=50, ignore_eos=True)
    for key, prompt in prompts.items():
        answer = collected[key]
        assert (len(prompt) + len(answer.token_ids), answer.finish_reason) == (128, "length")
        assert answer.token_ids == dense_greedy(model, prompt, len(answer.token_ids))
    assert max(len(prompts[it.request_id]) + it.position + len(it.draft_token_ids) for it in rounds) == 127


def test_what_a_medusa_has_no_heads_for_is_not_asked_of_it(host: EngineHost, model: Path, heads: Heads) -> None:
    folder = heads["medusa", "random"]
    info = host.load(heading(model, "medusa", folder, speculative__num_speculative_tokens=7))
    assert info.resolved_config.speculative.num_speculative_tokens == NUM_HEADS
    assert any(f"num_speculative_tokens is {NUM_HEADS} instead of 7" in notice for notice in info.notices)
    _, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
    assert max(len(it.draft_token_ids) for it in rounds) == NUM_HEADS
    info = host.load(heading(model, "medusa", folder, speculative__num_speculative_tokens=3))
    assert not any("num_speculative_tokens" in notice for notice in info.notices)
    _, rounds = answers_and_rounds(host, PROMPTS, **GREEDY)
    assert max(len(it.draft_token_ids) for it in rounds) == 3


def test_a_block_counts_the_bytes_of_the_head_s_layer(host: EngineHost, model: Path, heads: Heads) -> None:
    """An EAGLE head has one layer of the target's shape, a Medusa none."""
    layers: dict[HeadKind, int] = {"eagle": 4, "medusa": 3}
    for kind, num_layers in layers.items():
        info = host.load(heading(model, kind, heads[kind, "random"], cache__num_blocks=20))
        per_token = KVGroupSpec(num_layers, 3, 8, 4).bytes_per_token
        assert info.load["kv_bytes_per_token"] == per_token
        assert info.load["kv_cache_bytes"] == 21 * 16 * per_token


def test_heads_that_do_not_fit_are_refused(host: EngineHost, tmp_path: Path, model: Path, heads: Heads) -> None:
    other = make_tiny_llama(tmp_path / "other", seed=5)
    with pytest.raises(
        ConfigError, match=r"was trained for tiny, whose weights are not those of this target; train one"
    ):
        host.load(heading(other, "eagle", heads["eagle", "random"]))
    with pytest.raises(ConfigError, match=r"holds a head of kind eagle: it goes with speculative.method = 'eagle'"):
        host.load(heading(model, "medusa", heads["eagle", "random"]))
    with pytest.raises(
        ModelError, match=r"holds no draft head: config.json is missing; one is made by: servelab heads"
    ):
        host.load(heading(model, "medusa", tmp_path / "nowhere"))
    for kind in KINDS:
        with pytest.raises(ConfigError, match=f"no {kind} head comes for .*; train one with: servelab heads train"):
            host.load(config_of(model, speculative__method=kind))
    with pytest.raises(ConfigError, match="random weights, which no draft head can learn"):
        host.load(config_of("dummy:tiny", speculative__method="eagle"))
