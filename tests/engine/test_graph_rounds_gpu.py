"""Rounds of speculation in CUDA graphs, against the same engine without graphs; on a CPU test_graph_rounds.py stands for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.core.output import PendingOutput, SchedulerOutput
from backend.engine.engine_host import EngineHost
from backend.models.sources import resolve_source
from backend.spec_decode.heads.target import DenseTarget
from backend.worker.graph_rounds import GraphRounds
from backend.worker.model_runner import ModelRunner
from tests.engine.driving import answers, config_of, held, submit
from tests.engine.heads import KINDS, answers_and_rounds, let_draft_only_where_graphs_do, random_head, save
from tests.engine.looking_up import count_rounds
from tests.engine.test_gpu import prompts
from tests.spec_decode.tiny_heads import CPU

pytestmark = pytest.mark.gpu

GREEDY: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
METHODS = (*KINDS, "a model", "first layers", "ngram")
LOADS: list[dict[str, Any]] = [
    {},
    {"scheduler__max_num_batched_tokens": 33},
    {"cache__num_blocks": 40},
    {"scheduler__max_num_seqs": 3},
    {"speculative__num_speculative_tokens": 3},
    {"speculative__max_batch": 2},
]


@pytest.fixture(scope="module")
def gpu_host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[str, dict[str, Any]]:
    """What chooses each proposer."""
    folder, target = tmp_path_factory.mktemp("heads"), DenseTarget.load(resolve_source(str(tiny_llama)), CPU)
    vocabulary = torch.arange(0, 512, 2)
    chosen: dict[str, dict[str, Any]] = {
        kind: {
            "speculative__method": kind,
            "speculative__model": str(save(folder / kind, random_head(kind, target), kind, tiny_llama, vocabulary)),
        }
        for kind in KINDS
    }
    chosen["a model"] = {"speculative__method": "draft_model", "speculative__model": str(tiny_llama)}
    chosen["first layers"] = {"speculative__method": "draft_model"}
    chosen["ngram"] = {"speculative__method": "ngram"}
    return {
        name: {"model__device": "cuda", "model__dtype": "float32", "speculative__adaptive": False} | method
        for name, method in chosen.items()
    }


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_and_drafts_are_those_without_graphs(
    gpu_host: EngineHost,
    tiny_llama: Path,
    methods: dict[str, dict[str, Any]],
    method: str,
    load: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32, where rounding decides hardly ever, round by round."""
    let_draft_only_where_graphs_do(monkeypatch)
    seen = []
    for enforce_eager in (True, False):
        gpu_host.load(config_of(tiny_llama, **methods[method], **load, kernels__enforce_eager=enforce_eager))
        collected, rounds = answers_and_rounds(gpu_host, prompts(), **GREEDY)
        assert all(it.draft_ms >= 0 and it.verify_ms > 0 for it in rounds)
        drafts = sorted((it.request_id, it.position, it.draft_token_ids, it.num_accepted, it.token_id) for it in rounds)
        seen.append(({key: answer.token_ids for key, answer in collected.items()}, drafts))
    (tokens, drafts), (tokens_in_graphs, drafts_in_graphs) = seen
    assert tokens_in_graphs == tokens
    # Who is preempted may change with how far all are; what a text says is looked up in rounds that go on by themselves only
    # where the last known one found something.
    if not load.get("cache__num_blocks") and method != "ngram":
        assert drafts_in_graphs == drafts


@pytest.mark.parametrize(
    "load", [{}, {"speculative__max_batch": 2}, {"scheduler__max_num_batched_tokens": 33}], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_a_device_that_is_far_behind_the_host_reads_what_each_step_was_given(
    gpu_host: EngineHost,
    tiny_llama: Path,
    methods: dict[str, dict[str, Any]],
    method: str,
    load: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pause before each step, in which the host writes what the next ones are to read."""
    gpu_host.load(config_of(tiny_llama, **methods[method], **load))
    tokens = {key: answer.token_ids for key, answer in answers(gpu_host, prompts(), **GREEDY).items()}
    submit_step = ModelRunner.submit

    def pause_and_submit(self: ModelRunner, scheduled: SchedulerOutput) -> PendingOutput:
        torch.cuda._sleep(3_000_000)  # cycles: a millisecond and a half
        return submit_step(self, scheduled)

    monkeypatch.setattr(ModelRunner, "submit", pause_and_submit)
    assert {key: answer.token_ids for key, answer in answers(gpu_host, prompts(), **GREEDY).items()} == tokens


@pytest.mark.parametrize("method", METHODS)
def test_batch_invariant_tokens_are_those_of_plain_decoding_bit_for_bit(
    gpu_host: EngineHost, tiny_llama: Path, methods: dict[str, dict[str, Any]], method: str
) -> None:
    settings = {"model__dtype": "bfloat16", "kernels__batch_invariant": True}
    gpu_host.load(config_of(tiny_llama, model__device="cuda", **settings))
    plain = {key: answers(gpu_host, {key: prompt}, **GREEDY)[key].token_ids for key, prompt in prompts().items()}
    gpu_host.load(config_of(tiny_llama, **methods[method] | settings))
    assert {key: answer.token_ids for key, answer in answers(gpu_host, prompts(), **GREEDY).items()} == plain


@pytest.mark.parametrize("method", METHODS[:-1])  # what the host drafts it has to copy
def test_a_round_is_a_few_replays_and_nothing_in_it_waits(
    gpu_host: EngineHost,
    tiny_llama: Path,
    methods: dict[str, dict[str, Any]],
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from backend.models.triton_decoder import TritonDecoder

    gpu_host.load(config_of(tiny_llama, **methods[method]))
    calls: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    def watch(name: str) -> None:
        start = getattr(GraphRounds, name)

        def watched(self: GraphRounds, *args: Any) -> Any:
            calls["rounds"] += 1
            replays = calls["replay"]
            torch.cuda.set_sync_debug_mode("error")
            try:
                pending = start(self, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            calls["replays of rounds"] += calls["replay"] - replays
            return pending

        monkeypatch.setattr(GraphRounds, name, watched)

    watch("run")
    watch("repeat")
    count(torch.cuda.CUDAGraph, "replay")
    for name in ("forward", "run_layer"):
        count(TritonDecoder, name)
    answers(gpu_host, {"a": prompts()["p16"]}, **GREEDY)
    assert calls["rounds"] > 3
    assert calls["replays of rounds"] <= 3 * calls["rounds"]
    if method in KINDS:
        assert not calls["run_layer"]
        assert not calls["forward"]


@pytest.mark.parametrize("method", ["eagle", "medusa", "a model"])
def test_sampled_requests_get_the_tokens_of_plain_decoding(
    gpu_host: EngineHost,
    tiny_llama: Path,
    methods: dict[str, dict[str, Any]],
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit-equal logits, and so the same draws, beside greedy ones; their rounds follow each other without the host."""
    names = sorted(prompts())[:4]
    filters = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.6, "top_k": 9},
    ]

    def collect() -> dict[str, list[int]]:
        with held(gpu_host):
            collected = {
                name: submit(gpu_host, name, prompts()[name], **GREEDY, **each)
                for name, each in zip(names, filters, strict=True)
            }
        assert all(answer.last is not None for answer in collected.values())
        return {name: answer.token_ids for name, answer in collected.items()}

    exact: dict[str, Any] = {"model__device": "cuda", "model__dtype": "float32", "kernels__batch_invariant": True}
    gpu_host.load(config_of(tiny_llama, **exact))
    plain = collect()
    calls = count_rounds(monkeypatch)
    gpu_host.load(config_of(tiny_llama, **exact | methods[method]))
    assert collect() == plain
    assert calls["run"] > 0
    assert calls["repeat"] > 3 or method == "a model"
