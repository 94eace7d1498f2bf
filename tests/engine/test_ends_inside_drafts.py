"""An end inside an accepted block, with the drafts that each method makes itself."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backend.engine.engine_host import EngineHost
from backend.models.sources import resolve_source
from backend.spec_decode.heads.target import DenseTarget
from backend.spec_decode.heads.training import HeadTrainer, TrainingSettings, new_head
from backend.spec_decode.heads.training_data import Conversation
from tests.engine.driving import answers, config_of
from tests.engine.heads import NUM_HEADS, random_head, save
from tests.engine.scripted import edit_json, make_scripted
from tests.spec_decode.tiny_heads import CPU

CIRCLE = list(range(50, 78))  # the target's only text, which goes round
END = 20
K = 5
METHODS = ("ngram", "draft_model", "eagle", "medusa", "lookahead")
MOST = {"medusa": NUM_HEADS}  # of accepted tokens; else K
TRAINING = TrainingSettings(num_steps=16, num_unrolled=NUM_HEADS, batch_tokens=128, learning_rate=1e-2, seed=0)


@pytest.fixture(autouse=True)
def check_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELAB_DEBUG", "1")


@pytest.fixture(scope="module")
def circling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted(tmp_path_factory.mktemp("circling") / "model", [[*CIRCLE, CIRCLE[0]]])


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, circling: Path) -> dict[str, dict[str, Any]]:
    """Settings with which each method is mostly right about that text."""
    folder, target = tmp_path_factory.mktemp("heads"), DenseTarget.load(resolve_source(str(circling)), CPU)
    starts = np.arange(len(CIRCLE))[:, None]
    rows = np.array(CIRCLE, dtype=np.int32)[(starts + np.arange(32)) % len(CIRCLE)]
    texts = [Conversation(row, np.arange(32) > 0, True) for row in rows]
    named: dict[str, Any] = {"draft_model": circling}
    for kind in ("eagle", "medusa"):
        head = new_head(random_head(kind, target, (1,)), target, 0)
        trainer = HeadTrainer(head, target, (1,) if kind == "eagle" else (), torch.tensor(CIRCLE), TRAINING)
        assert trainer.train(texts)
        named[kind] = save(folder / kind, trainer.head, kind, circling, torch.tensor(CIRCLE), (1,))
    found: dict[str, dict[str, Any]] = {method: {"speculative__method": method} for method in METHODS}
    for method, model in named.items():
        found[method]["speculative__model"] = str(model)
    found["lookahead"] |= {"speculative__lookahead_window": 4, "speculative__lookahead_ngram": K + 1}
    return found


def check_ends(
    host: EngineHost, model: Path, options: Mapping[str, Any], most: int, sampling: Mapping[str, Any]
) -> None:
    """Of requests each of which begins a token nearer to its end, so that it lies at each place of a block.

    Their prompts go round once, to where the answer begins.
    """
    host.load(config_of(model, speculative__num_speculative_tokens=K, **options))
    prompts = {
        str(length): [CIRCLE[(END - length + at) % len(CIRCLE)] for at in range(-len(CIRCLE), 0)]
        for length in range(len(CIRCLE))
    }
    collected, offsets = answers(host, prompts, max_tokens=60, **sampling), set[int]()
    for key, answer in collected.items():
        expected = [CIRCLE[(END - int(key) + at) % len(CIRCLE)] for at in range(int(key))]
        assert (answer.token_ids, answer.finish_reason) == (expected, "stop")
        assert answer.text == "".join(event.text for event in answer.events) == host.tokenizer.decode(expected)
        counts, origins = answer.last.speculation, [origin for event in answer.events for origin in event.origins or ()]
        assert counts is not None
        assert (len(origins), counts.num_accepted_tokens) == (len(expected), origins.count("accepted"))
        assert counts.num_accepted_tokens <= counts.num_draft_tokens
        if len(answer.events) > 1:
            assert set(answer.last.origins or ()) <= {"accepted"}, "the token behind them is the end"
            offsets.add(len(answer.last.token_ids))
    assert offsets == set(range(most + 1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["stop id", "eos"])
def test_sd_1_an_end_anywhere_in_a_block(
    host: EngineHost, tmp_path: Path, circling: Path, drafters: dict[str, dict[str, Any]], method: str, how: str
) -> None:
    model, options, most = circling, drafters[method], MOST.get(method, K)
    sampling: dict[str, Any] = {"stop_token_ids": (CIRCLE[END],), "ignore_eos": True}
    if how == "eos":
        sampling, model = {}, shutil.copytree(circling, tmp_path / "ending")
        for name in ("config.json", "generation_config.json"):
            if (model / name).exists():
                edit_json(model / name, eos_token_id=CIRCLE[END])
    check_ends(host, model, options, most, sampling)
