"""Speculation in CUDA graphs, with stand-ins for them that are as strict: see `recorded_graphs`."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.core.draft_cost import DraftCost
from backend.engine.engine_host import EngineHost
from backend.models.sources import resolve_source
from backend.spec_decode.heads.head_config import HeadKind
from backend.spec_decode.heads.target import DenseTarget
from backend.worker.decoders import ReferenceDecoder
from backend.worker.draft_model_runner import DraftModelRunner
from tests.engine.driving import Answer, answers, check_idle, config_of, held, submit
from tests.engine.heads import (
    KINDS,
    answers_and_rounds,
    check_drafts,
    heading,
    load_drafter,
    random_head,
    rounds_of,
    save,
)
from tests.engine.looking_up import count_rounds
from tests.engine.speculating import at_random, scripted, whole
from tests.helpers import dense_greedy, load_oracle, make_tiny_model
from tests.spec_decode.tiny_heads import CPU, random_ids

from backend.worker.round_graphs import RoundGraphs  # isort: skip  # once the kernels are the interpreter's

VOCABULARY = torch.arange(0, 512, 2)
PROMPTS = {f"p{length}": random_ids(512, length, seed=length).tolist() for length in (1, 2, 15, 17, 40)}
GREEDY: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
SMALL: dict[str, Any] = {"model__max_model_len": 64, "scheduler__max_num_seqs": 5, "scheduler__async_scheduling": True}
PLAIN_STEPS = "off while more than two decode"
ADAPTIVE = "off where it loses"
MATRIX: dict[str, dict[str, Any]] = {
    "as ever": {},
    "chunks": {"scheduler__max_num_batched_tokens": 16, "cache__block_size": 4},
    "blocks of one": {"cache__block_size": 1},
    "preempted": {"cache__num_blocks": 7, "scheduler__preemption": "recompute"},
    "swapped": {"cache__num_blocks": 7, "scheduler__preemption": "swap"},
    PLAIN_STEPS: {"speculative__max_batch": 2},
    ADAPTIVE: {"speculative__adaptive": True},
    "drafts of three": {"speculative__num_speculative_tokens": 3},
}

OF_MEDUSA = ("as ever", "preempted", PLAIN_STEPS, ADAPTIVE)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[HeadKind, Path]:
    folder, target = tmp_path_factory.mktemp("heads"), DenseTarget.load(resolve_source(str(tiny_llama)), CPU)
    return {kind: save(folder / kind, random_head(kind, target), kind, tiny_llama, VOCABULARY) for kind in KINDS}


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    oracle = load_oracle(tiny_llama)
    return {key: dense_greedy(oracle, prompt, 20) for key, prompt in PROMPTS.items()}


@pytest.mark.parametrize(
    ("kind", "name"), [*(("eagle", name) for name in MATRIX), *(("medusa", name) for name in OF_MEDUSA)]
)
def test_heads_in_graphs(
    graph_host: EngineHost,
    replays: Counter[str],
    tiny_llama: Path,
    heads: dict[HeadKind, Path],
    expected: dict[str, list[int]],
    kind: HeadKind,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are the dense model's, and drafts those of the head alone; twice, with and without a prefix in the cache."""
    if name == ADAPTIVE:  # as much as beside a large model: beside this one it would never be worth it
        monkeypatch.setattr(DraftModelRunner, "cost", DraftCost(0.5, "cuda"))
    graph_host.load(heading(tiny_llama, kind, heads[kind], **SMALL, **MATRIX[name]))
    drafter = load_drafter(heads[kind], tiny_llama)
    monkeypatch.setattr(ReferenceDecoder, "forward", _refuse)
    for _ in range(2):
        collected, rounds = answers_and_rounds(graph_host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
        check_drafts(drafter, PROMPTS, collected, rounds[::3])
        if name in ("preempted", "swapped"):
            assert sum(answer.last.num_preemptions or 0 for answer in collected.values()) > 0
    assert replays["decode_graphs" if name in (PLAIN_STEPS, ADAPTIVE) else "round_graphs"] > 20
    assert name != ADAPTIVE or replays["round_graphs"]
    if kind == "eagle":
        assert replays["observe_graphs"] >= replays["decode_graphs"] + replays["mixed_graphs"] > 0
    elif name in (PLAIN_STEPS, ADAPTIVE):  # of steps that are repeated, Medusa heads need the last one before a draft
        assert replays["decode_graphs"] / 2 > replays["observe_graphs"] > replays["mixed_graphs"] > 0


@pytest.mark.parametrize(("kind", "block_size"), [("eagle", 1), ("eagle", 16), ("medusa", 4)])
def test_rounds_follow_each_other_without_the_host(
    graph_host: EngineHost,
    tiny_llama: Path,
    heads: dict[HeadKind, Path],
    expected: dict[str, list[int]],
    kind: HeadKind,
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As long as all go on alike. Beside others that end: at a stop id in the middle of what is under way, or by an abort."""
    calls = count_rounds(monkeypatch)
    graph_host.load(heading(tiny_llama, kind, heads[kind], **SMALL, cache__block_size=block_size))
    for key, prompt in PROMPTS.items():
        calls.clear()
        assert answers(graph_host, {key: prompt}, **GREEDY)[key].token_ids == expected[key]
        assert calls["repeat"] > 3
    for turn, stopped in enumerate(PROMPTS):
        stop_id = expected[stopped][7]
        with held(graph_host):
            going = {key: submit(graph_host, f"{turn}-{key}", prompt, **GREEDY) for key, prompt in PROMPTS.items()}
            sampling: dict[str, Any] = GREEDY | {"stop_token_ids": (stop_id,)}
            ending = submit(graph_host, f"{turn}-ending", PROMPTS[stopped], **sampling)
        graph_host.abort(f"{turn}-{list(PROMPTS)[turn - 1]}")
        assert ending.finish_reason == "stop"
        assert ending.token_ids == expected[stopped][: expected[stopped].index(stop_id)]
        for key, answer in going.items():
            assert answer.finish_reason == "length" or key == list(PROMPTS)[turn - 1]
            assert answer.token_ids == expected[key][: len(answer.token_ids)]
    check_idle(graph_host)


@pytest.mark.parametrize(("kind", "block_size"), [("eagle", 1), ("eagle", 16), ("medusa", 4)])
def test_one_that_comes_to_its_end_does_not_hold_up_the_others(
    graph_host: EngineHost,
    tiny_llama: Path,
    heads: dict[HeadKind, Path],
    expected: dict[str, list[int]],
    kind: HeadKind,
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last round is repeated with the others', and what that gives beyond its end is lost: in blocks that it has not."""
    calls = count_rounds(monkeypatch)
    graph_host.load(heading(tiny_llama, kind, heads[kind], **SMALL, cache__block_size=block_size))
    lengths = dict(zip(PROMPTS, (20, 17, 14, 11), strict=False))

    def collect() -> dict[str, Answer]:
        with held(graph_host):
            submitted = {
                key: submit(graph_host, key, PROMPTS[key], max_tokens=length, ignore_eos=True)
                for key, length in lengths.items()
            }
        assert all(answer.finish_reason == "length" for answer in submitted.values())
        return submitted

    collected, rounds = rounds_of(graph_host, collect)
    for key, length in lengths.items():
        assert collected[key].token_ids == expected[key][:length]
    for it in rounds:
        assert 1 <= len(it.draft_token_ids) < lengths[it.request_id] - it.position
        emitted = [*it.draft_token_ids[: it.num_accepted], it.token_id]
        assert emitted == expected[it.request_id][it.position :][: it.num_accepted + 1]
    # Rounds that waited for the host: behind the prompts, and at each end the one that can only bring its last token, the one
    # behind it, and one more until that is known.
    assert calls["run"] <= 3 * len(lengths) + 1
    assert calls["repeat"] >= 5
    check_idle(graph_host)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_round_is_drafted_before_the_host_has_heard_of_this_one(
    graph_host: EngineHost,
    tiny_llama: Path,
    heads: dict[HeadKind, Path],
    kind: HeadKind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But where its tokens have no slots yet; with blocks of one token that is whenever much is accepted."""
    counts: Counter[str] = Counter()
    for name in ("draft", "verify", "go_on"):
        original = getattr(RoundGraphs, name)

        def counted(self: RoundGraphs, name: str = name, original: Any = original) -> Any:
            counts[name] += 1
            return original(self)

        monkeypatch.setattr(RoundGraphs, name, counted)
    for block_size in (16, 1):
        graph_host.load(heading(tiny_llama, kind, heads[kind], **SMALL, cache__block_size=block_size))
        counts.clear()
        answers(graph_host, {"a": PROMPTS["p17"]}, **GREEDY)
        assert counts["verify"] == counts["go_on"] > 5
        assert 1 <= counts["draft"] < counts["verify"] / 2


def test_a_head_in_graphs_where_there_are_two_kv_groups(
    graph_host: EngineHost, replays: Counter[str], tmp_path: Path
) -> None:
    changes = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    model = make_tiny_model(tmp_path / "model", "Qwen2", **changes)
    target = DenseTarget.load(resolve_source(str(model)), CPU)
    head = save(tmp_path / "head", random_head("eagle", target), "eagle", model, VOCABULARY)
    graph_host.load(heading(model, "eagle", head, **SMALL, cache__block_size=4))
    collected, rounds = answers_and_rounds(graph_host, PROMPTS, **GREEDY)
    for key, prompt in PROMPTS.items():
        assert collected[key].token_ids == dense_greedy(model, prompt, 20)
    check_drafts(load_drafter(head, model), PROMPTS, collected, rounds[::3])
    assert replays["round_graphs"] > 20


@pytest.mark.parametrize("method", ["eagle", "medusa", "draft_model"])
def test_sampled_requests_get_the_tokens_of_plain_decoding(
    graph_host: EngineHost,
    replays: Counter[str],
    tiny_llama: Path,
    heads: dict[HeadKind, Path],
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With their seeds and filters, beside a greedy one, in rounds that follow each other without the host; but for the first
    tokens of one for which ids are banned, and with the probabilities that the model gives."""
    sampling = {
        "p1": {"temperature": 0.8, "top_k": 20, "seed": 3},
        "p2": {"temperature": 1.0, "seed": 2**63 - 1},
        "p15": {},
        "p17": {"temperature": 1.3, "top_p": 0.7, "seed": 5},
        "p40": {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "seed": 2**40},
    }

    def collect() -> dict[str, list[int]]:
        with held(graph_host):
            collected = {
                key: submit(graph_host, key, PROMPTS[key], max_tokens=20, ignore_eos=True, **sampling[key])
                for key in sampling
            }
        assert all(answer.finish_reason == "length" for answer in collected.values())
        return {key: answer.token_ids for key, answer in collected.items()}

    graph_host.load(config_of(tiny_llama, **SMALL))
    plain = collect()
    calls = count_rounds(monkeypatch)
    options = {"speculative__method": method, "speculative__model": str(tiny_llama)}
    if method in KINDS:
        options["speculative__model"] = str(heads[method])
    graph_host.load(config_of(tiny_llama, **options, **SMALL))
    if method in KINDS:  # a draft model catches up with prompts op by op
        monkeypatch.setattr(ReferenceDecoder, "forward", _refuse)
    assert collect() == plain
    assert replays["round_graphs"] > 10
    assert calls["repeat"] > 3 or method == "draft_model"


def test_what_sampled_rounds_tell_of_their_drafts(
    graph_host: EngineHost, tiny_llama: Path, heads: dict[HeadKind, Path]
) -> None:
    """Each draft's probability by a dense pass of the model after the request's filters, which is that of accepting it."""
    graph_host.load(heading(tiny_llama, "eagle", heads["eagle"], **SMALL))
    filters = {"temperature": 0.9, "top_k": 7, "seed": 11}
    collected, rounds = answers_and_rounds(graph_host, PROMPTS, max_tokens=20, ignore_eos=True, **filters)
    oracle, num_told = load_oracle(tiny_llama), 0
    for it in rounds:
        answer, prompt = collected[it.request_id].token_ids, PROMPTS[it.request_id]
        text = [*prompt, *answer[: it.position], *it.draft_token_ids]
        with torch.inference_mode():
            logits = oracle(torch.tensor([text])).logits[0, len(prompt) + it.position - 1 :]
        for place, token_id in enumerate(it.draft_token_ids):
            kept = logits[place].topk(7)
            law = torch.zeros(512).scatter(0, kept.indices, (kept.values / 0.9).softmax(-1))
            assert it.target_probs[place] == pytest.approx(law[token_id].item(), rel=2**-10, abs=1e-6), (
                "told in 16 bits"
            )
            assert it.accept_probs[place] == it.target_probs[place]
            assert it.draft_probs[place] == 1.0
            num_told += 0 < law[token_id] < 1
    assert num_told > 5


@pytest.mark.parametrize("name", ["as ever", "chunks", "preempted"])
@pytest.mark.parametrize("own", [True, False], ids=["a model", "first layers"])
def test_a_draft_model_in_graphs(
    graph_host: EngineHost,
    replays: Counter[str],
    tiny_llama: Path,
    expected: dict[str, list[int]],
    own: bool,
    name: str,
) -> None:
    """The target as its own draft is right but for near ties, and so only as long as its keys and values are whole."""
    draft = {"speculative__model": str(tiny_llama)} if own else {}
    graph_host.load(config_of(tiny_llama, speculative__method="draft_model", **draft, **SMALL, **MATRIX[name]))
    collected = answers(graph_host, PROMPTS, **GREEDY)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    counts = [answer.last.speculation for answer in collected.values()]
    drafted, accepted = (sum(it[place] for it in counts if it) for place in (1, 2))
    assert drafted > 50
    assert not own or accepted > 0.95 * drafted
    assert replays["round_graphs"] > 4


def test_drafts_that_the_host_makes_are_verified_in_graphs(
    replays: Counter[str], tiny_llama: Path, expected: dict[str, list[int]], graph_host: EngineHost
) -> None:
    """Right, wrong, and of some requests only."""
    with scripted(graph_host, tiny_llama, whole(PROMPTS, expected), at_random(1), **SMALL) as proposer:
        collected = answers(graph_host, PROMPTS, **GREEDY)
        assert {key: answer.token_ids for key, answer in collected.items()} == expected
        assert len({drafted for _, drafted, _ in proposer.drafted}) == 6
        origins = Counter(
            origin for answer in collected.values() for event in answer.events for origin in event.origins or ()
        )
        assert set(origins) == {"accepted", "recovered", "bonus", "plain"}
        assert origins["accepted"] == sum(right for _, _, right in proposer.drafted)
    assert replays["round_graphs"] > 10


def test_a_draft_near_the_end_of_its_model_s_context_is_made_without_graphs(
    graph_host: EngineHost, replays: Counter[str], tmp_path: Path, tiny_llama: Path
) -> None:
    short = shutil.copytree(tiny_llama, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    prompt = random_ids(512, 20, seed=0).tolist()
    graph_host.load(config_of(tiny_llama, speculative__method="draft_model", speculative__model=str(short), **SMALL))
    answer = answers(graph_host, {"a": prompt}, max_tokens=30, ignore_eos=True)["a"]
    assert answer.token_ids == dense_greedy(tiny_llama, prompt, 30)
    assert replays["round_graphs"] > 0


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a step has been launched op by op")
