"""Synthetic drafts in the graphs of rounds, and lookahead in those of mixed steps; see `recorded_graphs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.engine.engine_host import EngineHost
from backend.worker.model_runner import ModelRunner
from tests.engine.driving import answers
from tests.engine.test_equivalence import prompts_of
from tests.engine.test_lookahead import looking_ahead
from tests.engine.test_synthetic import synthetic
from tests.helpers import dense_greedy, load_oracle

PROMPTS = prompts_of([1, 2, 15, 17, 40])
SMALL: dict[str, Any] = {"model__max_model_len": 96, "scheduler__max_num_seqs": 5}


@pytest.fixture
def host(replays: Counter[str]) -> Iterator[EngineHost]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVELAB_DEBUG", "1")
        host = EngineHost()
        yield host
        host.close()


def test_lookahead_in_graphs(host: EngineHost, replays: Counter[str], tiny_llama: Path) -> None:
    """Windows have a mask in the graphs of mixed steps, prompts behind them none; where no window has room there is another
    graph."""
    oracle = load_oracle(tiny_llama)
    expected = {key: dense_greedy(oracle, prompt, min(60, 96 - len(prompt))) for key, prompt in PROMPTS.items()}
    host.load(looking_ahead(tiny_llama, 3, 3, **SMALL))
    collected = answers(host, PROMPTS, max_tokens=60, ignore_eos=True)
    assert {key: answer.token_ids for key, answer in collected.items()} == expected
    num_steps = max(it.last.speculation.num_rounds for it in collected.values() if it.last.speculation)
    assert replays["mixed_graphs"] > num_steps > 10
    assert replays["decode_graphs"]
    assert not replays["round_graphs"]


def test_synthetic_drafts_in_graphs_are_those_without(host: EngineHost, replays: Counter[str]) -> None:
    def lengths() -> dict[str, list[int]]:
        host.load(synthetic(0.6, 5, **SMALL))
        collected = answers(host, PROMPTS, max_tokens=40)
        return {key: [len(event.token_ids) for event in answer.events] for key, answer in collected.items()}

    with_graphs = lengths()
    assert replays["round_graphs"] > 10
    host.unload()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "capture_cuda_graphs", lambda *args: None)
        assert lengths() == with_graphs
