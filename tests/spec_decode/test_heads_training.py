"""Training: it helps, and it stops, or is killed, and goes on bit for bit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend.errors import ConfigError, ModelError
from backend.metrics.environment import environment
from backend.models.sources import resolve_source
from backend.spec_decode.heads import train_head
from backend.spec_decode.heads import training as training_module
from backend.spec_decode.heads.head_config import read_head_config
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.heads.train_head import HeadPlan, HeadResult, HeadTraining
from backend.spec_decode.heads.training import HeadTrainer, Progress, TrainingSettings, new_head
from backend.spec_decode.heads.unroll import DraftHead
from tests.spec_decode.tiny_heads import CPU, FEATURE_LAYERS, greedy_conversations, make_target, random_eagle

VOCAB_SIZE = 24
VOCABULARY = torch.arange(VOCAB_SIZE)
SETTINGS = TrainingSettings(num_steps=30, num_unrolled=3, batch_tokens=640, learning_rate=3e-3, seed=0)


def never() -> bool:
    return False


def after(number: int) -> Callable[[], bool]:
    calls = count()
    return lambda: next(calls) >= number


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_training_helps(tmp_path: Path, kind: str) -> None:
    target = make_target(tmp_path, VOCAB_SIZE)
    conversations = greedy_conversations(tmp_path, VOCAB_SIZE, 96)
    held_out = greedy_conversations(tmp_path, VOCAB_SIZE, 24, seed=4)
    head: DraftHead = random_eagle(target)
    if kind == "medusa":
        head = MedusaHeads(target.config.hidden_size, 3, dtype=torch.float32, device=CPU)
    trainer = HeadTrainer(new_head(head, target, 0), target, FEATURE_LAYERS, VOCABULARY, SETTINGS)
    before, reports = trainer.held_out_acceptance(held_out), []
    assert trainer.train(conversations, reports.append)
    trained = trainer.held_out_acceptance(held_out)
    assert before is not None
    assert trained is not None
    assert trained.mean_length > before.mean_length + 0.1
    assert reports[-1].loss < reports[0].loss
    assert [each.step for each in reports] == [20, 30]


def test_a_resumed_training_is_an_uninterrupted_one(tmp_path: Path) -> None:
    """Bit for bit, stopped in the warm-up and in the middle of an epoch."""
    target = make_target(tmp_path, VOCAB_SIZE)
    conversations = greedy_conversations(tmp_path, VOCAB_SIZE, 40)
    settings = TrainingSettings(num_steps=9, num_unrolled=2, batch_tokens=256, learning_rate=1e-2, seed=1)

    def trainer() -> HeadTrainer:
        return HeadTrainer(new_head(random_eagle(target), target, 1), target, FEATURE_LAYERS, VOCABULARY, settings)

    whole = trainer()
    assert whole.train(conversations)
    state = trainer().state()
    for stop in (0, 1, 4, 9):
        part = trainer()
        part.restore(*state)
        assert part.train(conversations, should_stop=after(stop)) == (stop == 9)
        tensors, values = part.state()
        state = {name: tensor.clone() for name, tensor in tensors.items()}, values
    assert state[1] == whole.state()[1]
    for name, tensor in whole.state()[0].items():
        assert torch.equal(tensor, state[0][name]), name


def test_training_is_saved_as_often_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which a step takes 10 s: after each step by whose end the interval has gone by since the last save."""
    target = make_target(tmp_path, VOCAB_SIZE)
    conversations = greedy_conversations(tmp_path, VOCAB_SIZE, 8)
    settings = TrainingSettings(num_steps=8, num_unrolled=2, batch_tokens=128, learning_rate=1e-3, seed=0)
    trainer = HeadTrainer(new_head(random_eagle(target), target, 1), target, FEATURE_LAYERS, VOCABULARY, settings)
    monkeypatch.setattr(training_module, "time", SimpleNamespace(perf_counter=lambda: 1000 + 10.0 * trainer.step))
    saved: list[int] = []
    assert trainer.train(conversations, save=lambda: saved.append(trainer.step), save_interval_s=25.0)
    assert saved == [3, 6]


def plan(**changes: Any) -> HeadPlan:
    settings = TrainingSettings(num_steps=4, num_unrolled=2, batch_tokens=256, learning_rate=1e-3, seed=0)
    values = {
        "kind": "eagle",
        "num_tokens": 400,
        "texts": (),
        "self_generated": True,
        "draft_vocab_size": 100,
        "training": settings,
        "command": "this test",
    }
    return HeadPlan(**(values | changes))


def run(
    target: Path, output: Path, should_stop: Callable[[], bool] = never, deadline: float = math.inf, **changes: Any
) -> Any:
    stages: list[str] = []
    progress: list[Progress] = []
    training = HeadTraining(resolve_source(str(target)), plan(**changes), output)
    return training.run(lambda what, *_: stages.append(what), progress.append, should_stop, deadline), stages


def test_slices_make_the_head_of_a_whole_run(small: Path, tmp_path: Path) -> None:
    """Stopped before the data, within them, before the first step and after two; each slice leaves what it did."""
    whole, _ = run(small, tmp_path / "whole")
    output = tmp_path / "slices"
    results = [run(small, output, after(number))[0] for number in (0, 1)]
    assert [result.step for result in results] == [0, 0]
    assert 0 == results[0].num_tokens < results[1].num_tokens < 400
    assert not (output / "model.safetensors").exists()
    for number, step in ((1, 0), (2, 2)):
        if number == 1:
            run(small, output, after(1))  # the second and last part of the data, and no step
        result, stages = run(small, output, after(number if step else 0))
        assert result.step == step
        assert "writing conversations" not in stages
        assert (result.config is None) == (step == 0)
        if step == 0:
            assert not (output / "config.json").exists(), "what has learnt nothing is no head"
        else:
            assert read_head_config(output).training["steps_done"] == step
    with pytest.raises(ConfigError, match="another kind"):
        run(small, output, kind="medusa")
    finished, _ = run(small, output)
    assert finished.step == whole.step == 4
    assert (output / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    configs = [read_head_config(folder) for folder in (output, tmp_path / "whole")]
    records = [dict(config.training) for config in configs]
    assert all(record.pop("training_seconds") > 0 for record in records), "no clock is the same twice"
    assert records[0] == records[1]
    assert replace(configs[0], training={}) == replace(configs[1], training={})
    assert not (output / "training").exists()
    with pytest.raises(ConfigError, match="finished"):
        run(small, output)


def test_slices_too_short_for_anything_come_to_an_end(small: Path, tmp_path: Path) -> None:
    """Each writes a part of the data or learns a step, and until the first step there is no head."""
    output, done = tmp_path / "slices", []
    while not done or done[-1][1] < 4:
        result, _ = run(small, output, deadline=0.0)
        assert not done or (result.num_tokens, result.step) > done[-1]
        done.append((result.num_tokens, result.step))
        assert (output / "config.json").exists() == (result.step > 0)
        assert len(done) < 20
    whole, _ = run(small, tmp_path / "whole")
    assert whole.step == 4
    assert (output / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


class Killed(BaseException):
    """Nobody catches it, so that nothing is done behind it."""


@pytest.mark.parametrize("files_in_place", [0, 1])
def test_a_killed_training_goes_on_from_its_last_save(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_in_place: int
) -> None:
    """Killed in its third step, of which it had saved two, and in the middle of a save: the head is that of a whole run."""
    monkeypatch.setattr(train_head, "_SAVE_INTERVAL_S", 0.0)
    run(small, tmp_path / "whole")
    output, steps = tmp_path / "killed", []

    def train(kill_before: int | None = None) -> HeadResult:
        def should_stop() -> bool:  # once before each step
            if kill_before is not None and steps and steps[-1] == kill_before - 1:
                raise Killed
            return False

        training = HeadTraining(resolve_source(str(small)), plan(), output)
        return training.run(lambda *_: None, lambda at: steps.append(at.step), should_stop)

    def replace_and_be_killed(source: Path, destination: Path) -> None:
        replaced.append(destination)
        if len(replaced) > files_in_place:
            raise Killed
        replace_file(source, destination)

    with pytest.raises(Killed):
        train(kill_before=3)
    assert steps == [1, 2]
    assert not (output / "config.json").exists(), "what is saved on the way is no head yet"
    replaced, replace_file = list[Path](), os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_and_be_killed)
        with pytest.raises(Killed):
            train()
    assert len(replaced) == files_in_place + 1
    assert steps == [1, 2, 3], "it went on behind the second step"
    assert train().step == 4
    assert steps == [1, 2, 3, 3, 4], "the third step, whose save was not whole, is learnt again"
    assert (output / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert not (output / "training").exists()


def test_the_time_of_training_is_that_of_all_slices(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that goes on by 10 s with each step of training, and by 1,000 s between slices."""
    now = [0.0]

    def train(num_steps: int | None) -> HeadResult:
        def should_stop() -> bool:
            now[0] += 10.0
            return num_steps is not None and now[0] > end

        now[0] += 1000.0
        end = now[0] + 10.0 * (num_steps or 0)
        return HeadTraining(resolve_source(str(small)), plan(), tmp_path / "head").run(
            lambda *_: None, lambda at: None, should_stop
        )

    run(small, tmp_path / "head", after(2))  # the conversations and no step
    monkeypatch.setattr(train_head, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    first, last = train(3), train(None)
    assert first.config is not None
    assert last.config is not None
    assert (first.step, last.step) == (3, 4)
    assert first.config.training["training_seconds"] == 40.0, "three steps, and the look at which it stopped"
    assert last.config.training["training_seconds"] == 50.0
    assert last.config.training["device"] == environment()["cpu"]


def test_an_untrained_head_is_told_from_one_that_is_ready(small: Path, tmp_path: Path) -> None:
    output = tmp_path / "head"
    run(small, output, after(4))
    config = json.loads((output / "config.json").read_text())
    assert config["training"]["steps_done"] > 0
    config["training"]["steps_done"] = 0
    (output / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="a head that is not trained yet; go on with: servelab heads train -o"):
        read_head_config(output)
