"""Training: it helps, it stops and goes on bit for bit, and a command makes a head from nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from app.cli import main
from backend.errors import ConfigError, ModelError
from backend.models.sources import resolve_source
from backend.spec_decode.heads import train_head
from backend.spec_decode.heads.head_config import read_head_config
from backend.spec_decode.heads.medusa import MedusaHeads
from backend.spec_decode.heads.train_head import HeadPlan, HeadTraining
from backend.spec_decode.heads.training import HeadTrainer, Progress, TrainingSettings, new_head
from backend.spec_decode.heads.unroll import DraftHead
from tests.helpers import make_tiny_llama
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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A target, and conversations of it that take no time to write."""
    monkeypatch.setattr(train_head, "MAX_LENGTH", 96)
    monkeypatch.setitem(train_head._CONVERSATIONS_AT_ONCE, "cpu", 4)
    return make_tiny_llama(tmp_path / "target")


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
    assert (output / "config.json").read_text() == (tmp_path / "whole" / "config.json").read_text()
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


def test_an_untrained_head_is_told_from_one_that_is_ready(small: Path, tmp_path: Path) -> None:
    output = tmp_path / "head"
    run(small, output, after(4))
    config = json.loads((output / "config.json").read_text())
    assert config["training"]["steps_done"] > 0
    config["training"]["steps_done"] = 0
    (output / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="a head that is not trained yet; go on with: servelab heads train -o"):
        read_head_config(output)


def test_the_command_makes_a_head(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is it?")
    arguments = ["heads", "train", "--kind", "medusa", "--model", str(small), "-o", str(tmp_path / "head")]
    sizes = ["--tokens", "300", "--steps", "2", "--batch-tokens", "128", "--draft-vocab", "64", "--seed", "3"]
    assert main([*arguments, *sizes]) == 1
    assert "nothing to train on" in capsys.readouterr().err
    assert main([*arguments, *sizes, "--prompts", str(prompts), "--self-generated", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["finished"], document["steps"], document["draft_vocab_size"]) == (True, 2, 64)
    assert 0 < document["held_out"]["coverage"] < 1
    config = read_head_config(tmp_path / "head")
    assert (config.kind, config.num_speculative_tokens, config.draft_vocab_size) == ("medusa", 4, 64)
    assert config.training["held_out"] == document["held_out"]
    assert config.training["command"].endswith(
        f"--self-generated --prompts {prompts} --tokens 300 --steps 2 --batch-tokens 128 --learning-rate 0.001 "
        "--draft-vocab 64 --seed 3"
    )
    assert "step 2 of 2" in captured.err
    assert captured.err.splitlines()[-1] == f"{tmp_path / 'head'} is ready"
