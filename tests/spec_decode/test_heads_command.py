"""`servelab heads train`: it makes a head from nothing, and the command in a head's config makes that head again."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from app.cli import main
from backend.spec_decode.heads import train_head
from backend.spec_decode.heads.head_config import read_head_config
from backend.spec_decode.heads.shipped import SHIPPED
from backend.spec_decode.heads.train_head import HeadPlan, HeadResult


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
    assert "step 2 of 2" in captured.err
    assert captured.err.splitlines()[-1] == f"{tmp_path / 'head'} is ready"


def test_a_head_s_command_makes_it_again(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Typed as it stands in the config, with names that a shell would take apart: the same weights from the same data."""
    output, data, prompts = tmp_path / "a head", tmp_path / "its data", tmp_path / "$what to ask.txt"
    prompts.write_text("What is it?")
    places = ["-o", str(output), "--data", str(data), "--prompts", str(prompts), "--self-generated"]
    sizes = ["--tokens", "300", "--steps", "2", "--batch-tokens", "128", "--learning-rate", "0.00123456789"]
    command = ["heads", "train", "--kind", "medusa", "--model", str(small), *places, *sizes, "--draft-vocab", "64"]
    assert main([*command, "--minutes", "60"]) == 0
    first = (output / "model.safetensors").read_bytes()
    written = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    recorded = shlex.split(read_head_config(output).training["command"])
    assert recorded[0] == "servelab"
    shutil.rmtree(output)
    assert main(recorded[1:]) == 0
    assert (output / "model.safetensors").read_bytes() == first
    assert {path.name: path.stat().st_mtime_ns for path in data.iterdir()} == written, "read, and not written again"
    assert not (output / "data").exists()
    capsys.readouterr()


@pytest.mark.parametrize("folder", sorted(SHIPPED.iterdir()), ids=lambda folder: folder.name)
def test_the_command_of_a_shipped_head_can_be_typed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is understood, and asks for what the head's config says of it."""
    asked: list[tuple[str, HeadPlan, Path, Path | None]] = []

    class Asked:
        def __init__(self, model: str, plan: HeadPlan, output: Path, data: Path | None) -> None:
            asked.append((model, plan, output, data))

        def run(self, *_: object) -> HeadResult:
            return HeadResult(0, 0, None, None)

    monkeypatch.setattr(train_head, "HeadTraining", Asked)
    monkeypatch.setattr("backend.models.sources.ensure_model", lambda name, on_progress: name)
    config = read_head_config(folder)
    command = shlex.split(config.training["command"])
    assert command[0] == "servelab"
    assert main(command[1:]) == 0
    ((model, plan, output, data),) = asked
    assert (model, output, data) == (config.target, Path("DIR"), None)
    assert (plan.kind, plan.draft_vocab_size) == (config.kind, config.draft_vocab_size)
    assert (plan.self_generated, plan.texts) == (config.training["data"]["self_generated"], ())
    assert plan.num_tokens <= config.training["data"]["num_tokens"]
    assert asdict(plan.training) == {name: config.training[name] for name in asdict(plan.training)}
