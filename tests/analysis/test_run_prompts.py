"""Prompts of stored runs: what is put together again is what the driver sent, and what cannot be is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backend.analysis import run_prompts
from backend.analysis.run_prompts import RunPrompts
from backend.errors import ConfigError, RequestError
from backend.experiments.runner import run_workload
from backend.metrics.sinks import PeakSink
from backend.metrics.stats import RequestStats
from backend.request import sample_ids
from backend.sampling_params import SamplingParams
from backend.workload.datasets import build_requests, build_warmup_requests, prompts_digest
from backend.workload.spec import Workload
from backend.workload.targets import Prompt
from tests.experiments.simulated_target import Plan, SimulatedTarget

VOCAB, LENGTH = 5000, 400


def encode(prompt: Prompt) -> list[int]:
    text = f"<chat>{prompt.text}" if prompt.chat else prompt.text or ""
    return list(text.encode())


class Target(SimulatedTarget):
    """Remembers the ids of all prompts, and how long they were."""

    def __init__(self) -> None:
        super().__init__(lambda request_id, *_: answer(request_id))
        self.ids: dict[str, list[int]] = {}

    def submit(self, request_id: str, prompt: Prompt, sampling: SamplingParams, *args: Any, **kwargs: Any) -> None:
        ids = encode(prompt) if prompt.token_ids is None else list(prompt.token_ids)
        self.ids |= dict.fromkeys(sample_ids(request_id, sampling.n), ids)
        super().submit(request_id, prompt, sampling, *args, **kwargs)


def answer(request_id: str) -> Plan:
    random = Random(request_id)
    return Plan([(random.uniform(0.01, 0.3), random.randrange(4), "x") for _ in range(random.randrange(1, 5))])


def sent(data: dict[str, Any]) -> tuple[Workload, Target, list[dict[str, Any]]]:
    """A run's workload, the target that has seen it, and its records as they are stored."""
    workload = Workload.from_dict({"warmup_requests": 2, **data})
    target = Target()
    result = run_workload(
        workload,
        target,
        PeakSink(),
        warmup=build_warmup_requests(workload, VOCAB, LENGTH),
        requests=build_requests(workload, VOCAB, LENGTH),
        cancel=threading.Event(),
        name="run12",
        clock=target.clock,
        wait=target.wait,
    )
    return workload, target, [row(stats, target) for stats in result.requests]


def row(stats: RequestStats, target: Target) -> dict[str, Any]:
    return {
        "request_id": stats.request_id,
        "prompt": stats.prompt,
        "token_ids": json.loads(json.dumps(stats.token_ids)),
        "num_prompt_tokens": len(target.ids[stats.request_id]),
    }


def digest_of(workload: Workload) -> str:
    return prompts_digest(build_requests(workload, VOCAB, LENGTH))


def prompts_of(workload: Workload, **changes: Any) -> RunPrompts:
    arguments = {"model": {"vocab_size": VOCAB}, "max_model_len": LENGTH, "encode": encode} | changes
    if "digest" not in changes:
        arguments["digest"] = digest_of(workload)
    return RunPrompts(workload, **arguments)


@pytest.fixture
def mooncake(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * index, "input_length": 30 + index, "output_length": 4, "hash_ids": [1, 2 + index % 3]}
        for index in range(5)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return {"source": {"kind": "mooncake", "file": str(path), "block_len": 20}}


SOURCES: dict[str, dict[str, Any]] = {
    "texts": {"source": {"kind": "prompts"}},
    "raw texts": {"source": {"kind": "prompts", "prompts": ["one", "two", "one"], "chat": False}},
    "random ids": {
        "source": {"kind": "synthetic", "num_requests": 5, "prompt_len": {"kind": "uniform", "min": 3, "max": 30}}
    },
    "samples": {"source": {"kind": "synthetic", "num_requests": 3}, "sampling": {"n": 2}},
    "shared prefixes": {"source": {"kind": "shared_prefix", "groups": 2, "prefix_len": 40}},
    "conversations": {
        "source": {"kind": "conversations", "turns": {"kind": "uniform", "min": 1, "max": 6}, "system_len": 9}
    },
}


@pytest.mark.parametrize("data", SOURCES.values(), ids=SOURCES.keys())
def test_all_prompts_are_those_that_were_sent(data: dict[str, Any]) -> None:
    workload, target, rows = sent(data)
    prompts = prompts_of(workload)
    prompts.add(rows)
    assert len(rows) == len(target.ids) > 4
    for stored in rows:
        known = prompts.tokens_of(stored["request_id"])
        assert known is not None
        assert known.prompt.tolist() == target.ids[stored["request_id"]]
        assert known.token_ids.tolist() == target.ids[stored["request_id"]] + stored["token_ids"]
    assert prompts.tokens_of("someone-else") is None


def test_a_trace_is_drawn_again_as_long_as_its_file_is_the_same(mooncake: dict[str, Any]) -> None:
    workload, target, rows = sent(mooncake)
    prompts = prompts_of(workload)
    prompts.add(rows)
    assert {key: prompts.tokens_of(key).prompt.tolist() for key in target.ids} == target.ids  # type: ignore[union-attr]
    digest = digest_of(workload)
    path = Path(mooncake["source"]["file"])
    path.write_text(path.read_text().replace('"hash_ids": [1, 2]', '"hash_ids": [9, 2]'))
    with pytest.raises(ConfigError, match="not those that it sent"):
        prompts_of(workload, digest=digest)
    path.unlink()
    with pytest.raises(ConfigError, match=str(path)):
        prompts_of(workload, digest=digest)


def test_before_records_come_what_the_workload_alone_says_is_known() -> None:
    workload, target, _ = sent(SOURCES["shared prefixes"])
    prompts = prompts_of(workload)
    assert {key: prompts.tokens_of(key).prompt.tolist() for key in target.ids} == target.ids  # type: ignore[union-attr]
    workload, target, rows = sent(SOURCES["conversations"])
    prompts = prompts_of(workload)
    assert prompts.tokens_of("run12-c0-t0") is not None
    further = next(key for key in target.ids if key.endswith("-t1"))
    assert prompts.tokens_of(further) is None, "the answer before it is not recorded"
    before = further.removesuffix("1") + "0"
    prompts.add([stored for stored in rows if stored["request_id"] == before])
    known = prompts.tokens_of(further)
    assert known is not None
    assert known.token_ids.tolist() == target.ids[further]
    prompts.add([stored for stored in rows if stored["request_id"] == further])
    answered = prompts.tokens_of(further)
    assert answered is not None
    assert len(answered.token_ids) > len(known.token_ids), "the record brings the answer"


def test_texts_are_known_from_records_when_their_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n{"prompt": "world"}\n')
    workload, target, rows = sent({"source": {"kind": "prompts", "file": str(path)}})
    digest = digest_of(workload)
    path.unlink()
    prompts = prompts_of(workload, digest=digest)
    prompts.add(rows[:-1])
    assert [prompts.tokens_of(stored["request_id"]) is None for stored in rows] == [False] * (len(rows) - 1) + [True]
    first = rows[0]["request_id"]
    assert prompts.tokens_of(first).prompt.tolist() == target.ids[first]  # type: ignore[union-attr]


def test_what_has_changed_since_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, _, rows = sent(SOURCES["texts"])
    prompts = prompts_of(workload, encode=lambda prompt: [*encode(prompt), 7])
    prompts.add(rows)
    with pytest.raises(ConfigError, match=r"request run12-3 has .* tokens today and had"):
        prompts.tokens_of("run12-3")

    def refuse(prompt: Prompt) -> list[int]:
        raise RequestError("no chat template")

    assert prompts_of(workload, encode=refuse).tokens_of("run12-0") is None
    with pytest.raises(ConfigError, match="not those"):
        prompts_of(Workload.from_dict(SOURCES["random ids"]), digest=None)
    monkeypatch.setattr(run_prompts, "MAX_PROMPT_TOKENS", 50)
    with pytest.raises(ConfigError, match=r"more than 50 tokens in all"):
        prompts_of(Workload.from_dict(SOURCES["shared prefixes"]))
    prompts = prompts_of(workload)
    with pytest.raises(ConfigError, match=r"more than 50 tokens in all"):
        [prompts.tokens_of(stored["request_id"]) for stored in rows]
