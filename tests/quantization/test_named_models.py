"""`servelab quantize --name`: a quantized model that is known by a name, as a pulled one is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from backend.models import sources, store
from backend.quantization.single_layer import SingleLayer
from tests.helpers import make_tiny_llama

QUICK = ("--windows", "3", "--window-length", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    return make_tiny_llama(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=160, **heads)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


def run(model: Path | str, *options: str) -> int:
    return main(["quantize", str(model), *QUICK, *options])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != store.MANIFEST_NAME}


def test_it_is_a_model_wherever_one_is_named(
    model: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--method", "gptq", "--bits", "3", "--group-size", "32", "--head", "int8", "--skip", "*.o_proj")
    assert run(model, *options, "--name", "tiny-gptq") == 0
    assert "tiny-gptq is ready: pack-quantized, int3, groups of 32, zero points; output head" in capsys.readouterr().err
    assert run(model, *options, "-o", str(tmp_path / "out")) == 0
    assert contents(home / "tiny-gptq") == contents(tmp_path / "out")
    assert [path.name for path in home.iterdir()] == ["tiny-gptq"]
    capsys.readouterr()
    assert main(["models", "list", "--json"]) == 0
    (listed,) = [each for each in json.loads(capsys.readouterr().out) if each["name"] == "tiny-gptq"]
    assert listed["state"] == "ready"
    assert listed["description"] == f"{model} by gptq"
    assert "int3, groups of 32" in listed["quantization"]
    assert main(["models", "info", "tiny-gptq", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["origin"] == f"{model}, quantized by gptq"
    assert info["quantization"] == listed["quantization"]
    assert main(["generate", "hello", "--model", "tiny-gptq", "--raw", "--max-tokens", "4"]) == 0
    text = tmp_path / "text.txt"
    text.write_text("Some words to read. " * 5)
    quality = ["quality", "tiny-gptq", "--text", str(text), "--reference", str(model), "--json"]
    capsys.readouterr()
    assert main(quality) == 0
    assert json.loads(capsys.readouterr().out)["kl"]["mean"] > 0
    assert main(["models", "remove", "tiny-gptq", "--yes"]) == 0
    assert list(home.glob("[!.]*")) == []


def test_a_license_goes_with_the_weights(model: Path, home: Path) -> None:
    sources.add_model(model, "mine")
    manifest = store.read_manifest(home / "mine")
    store.write_manifest(home / "mine", replace(manifest, license="Apache-2.0"))
    assert run("mine", "--method", "int8", "--name", "mine-int8") == 0
    assert store.read_manifest(home / "mine-int8").license == "Apache-2.0"


def test_an_interrupted_one_goes_on(
    model: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = SingleLayer.load

    def interrupted(self: SingleLayer, index: int, read: Any) -> None:
        if index == 2:
            raise KeyboardInterrupt
        load(self, index, read)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SingleLayer, "load", interrupted)
        assert run(model, "--method", "int8", "--name", "mine") == 130
    assert store.stored_names() == []
    assert run(model, "--method", "int8", "--name", "mine", "--json") == 0
    assert json.loads(capsys.readouterr().out)["resumed_layers"] == 2
    assert sources.resolve_source("mine").path == home / "mine"
    assert run(model, "--method", "int8", "-o", str(tmp_path / "out")) == 0
    assert contents(home / "mine") == contents(tmp_path / "out")


def test_a_damaged_one_is_made_again(model: Path, home: Path) -> None:
    assert run(model, "--method", "int8", "--name", "mine") == 0
    next((home / "mine").glob("*.safetensors")).unlink()
    assert run(model, "--method", "fp8", "--name", "mine") == 0
    assert "float8" in str(sources.model_info("mine")["quantization"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "with --output, or a name for the model, with --name"),
        (("--name", "x", "-o", "x"), "with --output, or a name for the model, with --name"),
        (("--name", "x", "--force"), "--force goes with --output"),
        (("--name", "a b"), "cannot name a model"),
        (("--name", ""), "cannot name a model"),
        (("--name", "smollm2-135m"), "stands for SmolLM2-135M-Instruct"),
        (("--name", "taken"), "already a model 'taken'"),
        (("--name", "x", "--granularity", "tensor"), "granularity = 'tensor' belongs to method"),
    ],
)
def test_what_does_not_go_is_refused_before_anything_is_written(
    model: Path, home: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    sources.add_model(model, "taken")
    assert run(model, "--method", "int8", *options) == 1
    assert message in capsys.readouterr().err
    assert store.stored_names() == ["taken"]


def test_granularity_of_fp8(model: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--method", "fp8", "--granularity", "tensor", "--name", "mine", "--json") == 0
    assert json.loads(capsys.readouterr().out)["scheme"]["scale_of"] == "tensor"
    assert main(["generate", "hello", "--model", "mine", "--raw", "--max-tokens", "2"]) == 0
