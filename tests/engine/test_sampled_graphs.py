"""Sampled requests whose decode steps are graphs: the device draws by itself as long as the batch stays."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from backend.worker.draw_graphs import DrawGraphs
from tests.engine.driving import Pausing, config_of, held, submit, submit_to
from tests.spec_decode.tiny_heads import random_ids

OPTIONS: dict[str, Any] = {
    "model__max_model_len": 128,
    "scheduler__max_num_seqs": 5,
    "scheduler__async_scheduling": True,
}
PROMPTS = {f"p{length}": random_ids(512, length, seed=length).tolist() for length in (2, 15, 17, 40)}
SAMPLING: dict[str, dict[str, Any]] = {
    "p2": {"temperature": 0.8, "seed": 3, "max_tokens": 60},
    "p15": {"max_tokens": 45},
    "p17": {"temperature": 1.2, "top_p": 0.8, "seed": 2**60, "max_tokens": 23},
    "p40": {"temperature": 0.7, "top_k": 9, "seed": 5, "max_tokens": 50, "min_tokens": 20, "ignore_eos": False},
}


def collect(host: EngineHost) -> dict[str, list[int]]:
    """Of four that begin together and end one after the other, and of one that comes in between."""
    first = Pausing()
    with held(host):
        submit_to(first, host, "p2", PROMPTS["p2"], **({"ignore_eos": True} | SAMPLING["p2"]))
        answers = {
            key: submit(host, key, PROMPTS[key], **({"ignore_eos": True} | SAMPLING[key]))
            for key in SAMPLING
            if key != "p2"
        }
    with first.paused():
        late = submit(host, "late", PROMPTS["p17"], temperature=1.0, seed=9, max_tokens=40, ignore_eos=True)
    answers |= {"p2": first, "late": late}
    assert all(answer.last.error is None for answer in answers.values())
    return {key: answer.token_ids for key, answer in answers.items()}


def test_tokens_are_those_without_graphs(
    host: EngineHost,
    graph_host: EngineHost,
    replays: Counter[str],
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a greedy one, and one for which ids are banned at first."""
    host.load(config_of(tiny_llama, **OPTIONS))
    expected = collect(host)
    assert len(expected["p2"]) == 60
    num_started = 0
    start = DrawGraphs.start

    def counted(*args: Any) -> None:
        nonlocal num_started
        num_started += 1
        start(*args)

    monkeypatch.setattr(DrawGraphs, "start", counted)
    graph_host.load(config_of(tiny_llama, **OPTIONS))
    assert collect(graph_host) == expected
    assert replays["decode_graphs"] >= replays["draw_graphs"] > 40
    assert 0 < 3 * num_started < replays["draw_graphs"], "the host says how to sample where the batch changes"


def test_a_capture_leaves_the_rows_of_requests_alone(graph_host: EngineHost, tiny_llama: Path) -> None:
    """What graphs choose and draw while they are captured, they leave in the padding's row."""
    graph_host.load(config_of(tiny_llama, **OPTIONS))
    runner = graph_host._require().engine.executor._runner  # type: ignore[attr-defined]
    assert runner._last_tokens[:-1].tolist() == [0] * 5
