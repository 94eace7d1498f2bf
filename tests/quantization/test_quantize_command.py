"""`servelab quantize` on a model of random weights: a folder like any other, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.cli import main
from backend.models.checkpoint import Checkpoint
from backend.models.sources import resolve_source
from backend.quantization.calibration import DEFAULT_TEXT, cut_windows
from backend.quantization.formats.compressed_tensors import decode
from backend.quantization.formats.scheme import StoredScheme
from backend.quantization.single_layer import SingleLayer
from backend.tokenizer import load_tokenizer
from tests.helpers import load_oracle, make_tiny_llama

METHODS = ("int8", "int4", "gptq", "awq", "w8a8_int8", "fp8")
ON_GRID = ("int4", "gptq", "awq")
QUICK = ("--windows", "3", "--window-length", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    return make_tiny_llama(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=160, **heads)


def run(model: Path | str, output: Path, *options: str) -> int:
    return main(["quantize", str(model), "-o", str(output), *QUICK, *options])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("method", METHODS)
def test_the_folder_is_a_model_like_any_other(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    assert run(model, tmp_path / "out", "--method", method) == 0
    shown = capsys.readouterr()
    for kind in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down"):
        assert kind in shown.out
    assert "out is ready" in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert main(["generate", "hello", "--model", str(tmp_path / "out"), "--raw", "--max-tokens", "4"]) == 0
    assert main(["models", "info", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(("zero_point", "is_said"), [("integer", True), ("none", False)])
def test_how_transformers_loads_zero_points_is_said_last(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], zero_point: str, is_said: bool
) -> None:
    """What is said holds: test_compressed_tensors_library.py loads either kind so."""
    assert run(model, tmp_path / "out", "--method", "int4", "--zero-point", zero_point) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert ("quantization_config=CompressedTensorsConfig(dequantize=True)" in last) == is_said
    assert ("--zero-point none" in last) == is_said


def test_the_document_says_what_the_files_hold(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--method", "gptq", "--bits", "3", "--group-size", "32", "--skip", "*.o_proj", "--json")
    assert run(model, tmp_path / "out", *options) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["scheme"]["bits"] == 3
    assert document["skipped"] == [f"layers.{index}.attention.output" for index in range(3)]
    assert len(document["modules"]) == 3 * 3
    with Checkpoint(tmp_path / "out") as checkpoint:
        for module in document["modules"]:
            names = {"mlp.down": ["down_proj"], "mlp.gate_up": ["gate_proj", "up_proj"]}
            places = [f"mlp.{name}" for name in names.get(module["module"], [])] or [
                f"self_attn.{name}_proj" for name in "qkv"
            ]
            prefixes = [f"model.layers.{module['layer']}.{place}" for place in places]
            shapes = [checkpoint.tensor(f"{prefix}.weight_shape").tolist() for prefix in prefixes]
            held = sum(
                checkpoint.tensor(f"{prefix}.weight_{kind}").nbytes
                for prefix in prefixes
                for kind in ("packed", "scale", "zero_point")
            )
            assert module["bits_per_weight"] == pytest.approx(
                8 * held / sum(rows * columns for rows, columns in shapes)
            )
        assert checkpoint.tensor("model.layers.0.self_attn.o_proj.weight").shape == (64, 64)


def test_errors_are_of_inputs_that_the_layers_before_give_as_they_are_stored(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' model, its first layers replaced by what is in the files."""
    options = ("--method", "int4", "--bits", "2", "--group-size", "32", "--json", "--seed", "5")
    assert run(model, tmp_path / "out", *options) == 0
    document = json.loads(capsys.readouterr().out)
    errors = {(module["layer"], module["module"]): module["relative_error"] for module in document["modules"]}
    tokens = load_tokenizer(resolve_source(str(model))).encode(DEFAULT_TEXT.read_text())
    windows = cut_windows(tokens, 3, 64, 5)
    oracle, scheme = load_oracle(model), StoredScheme("pack-quantized", 2, "group", 32, symmetric=False)
    original = load_file(model / "model.safetensors")
    inputs: list[torch.Tensor] = []
    oracle.model.layers[2].mlp.down_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with Checkpoint(tmp_path / "out") as checkpoint:

        def stored(name: str) -> torch.Tensor:
            shape = original[f"{name}.weight"].shape
            return decode(name, lambda each, *_: checkpoint.tensor(each), scheme, (shape[0], shape[1])).dequantize()

        for name, module in oracle.named_modules():
            if name.endswith("_proj") and ".layers.2." not in name:
                module.weight.data = stored(name)
        with torch.no_grad():
            oracle(windows)
        name = "model.layers.2.mlp.down_proj"
        weight, x = original[f"{name}.weight"], inputs[0].flatten(0, 1)
        expected = (x @ (stored(name) - weight).t()).norm() / (x @ weight.t()).norm()
    assert errors[2, "mlp.down"] == pytest.approx(float(expected), rel=1e-3)


def test_gptq_and_awq_err_less_than_rounding(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = {}
    for method in ON_GRID:
        assert run(model, tmp_path / method, "--method", method, "--bits", "3", "--group-size", "32", "--json") == 0
        modules = json.loads(capsys.readouterr().out)["modules"]
        errors[method] = [module["relative_error"] for module in modules if module["layer"] == 0]
    assert all(chosen < rounded for chosen, rounded in zip(errors["gptq"], errors["int4"], strict=True))
    assert sum(errors["awq"]) < sum(errors["int4"])


def interrupt(monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    load = SingleLayer.load

    def interrupted(self: SingleLayer, index: int, read: Any) -> None:
        if index == layer:
            raise KeyboardInterrupt
        load(self, index, read)

    monkeypatch.setattr(SingleLayer, "load", interrupted)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    options = ("--method", method, "--group-size", "32")
    assert run(model, tmp_path / "whole", *options) == 0
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 2)
        assert run(model, tmp_path / "out", *options) == 130
    assert "interrupted; 2 layers are in" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(model, tmp_path / "out", *options) == 0
    assert "2 layers were there from an earlier run" in capsys.readouterr().err
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("changed", [("--bits", "3"), ("--seed", "1"), ("--method", "awq")])
def test_other_settings_start_afresh(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: tuple[str, str]
) -> None:
    options = ("--method", "gptq", "--group-size", "32")
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 1)
        assert run(model, tmp_path / "out", *options) == 130
    assert run(model, tmp_path / "out", *options, *changed, "--json") == 0
    assert json.loads(capsys.readouterr().out)["resumed_layers"] == 0


def test_a_run_that_ends_before_its_first_layer_leaves_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 0)
    assert run(model, tmp_path / "out", "--method", "int8") == 130
    assert "interrupted; no layer is finished" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_as_it_gets_its_name_goes_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("backend.quantization.work_folder.shutil.copyfile", no_room)
        assert run(model, tmp_path / "out", "--method", "int8") == 1
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert run(model, tmp_path / "out", "--method", "int8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["resumed_layers"] == 3
    assert run(model, tmp_path / "whole", "--method", "int8") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_folder_that_is_there_is_replaced_only_when_forced(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.mkdir()  # an empty one is as good as none
    assert run(model, output, "--method", "int8") == 0
    before = contents(output)
    assert run(model, output, "--method", "int4") == 1
    assert "exists and is not empty; name another folder, or replace it with --force" in capsys.readouterr().err
    assert contents(output) == before
    assert run(model, output, "--method", "int4", "--force") == 0
    assert contents(output) != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_no_model_is_never_replaced(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    assert run(model, tmp_path / "home", "--method", "int8", "--force") == 1
    assert "holds no model" in capsys.readouterr().err
    assert run(model, tmp_path / "file", "--method", "int8", "--force") == 1
    assert "is not a folder" in capsys.readouterr().err
    assert run(model, model, "--method", "int8", "--force") == 1
    assert "is the model itself" in capsys.readouterr().err
    assert (model / "model.safetensors").is_file()
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "gptq", "--zero-point", "float"), "zero_point = 'float' cannot be saved"),
        (("--method", "int8", "--bits", "4"), "bits does not go with method int8; it goes with int4, gptq, awq"),
        (
            ("--method", "gptq", "--group-size", "48"),
            "does not divide the 64 inputs of model.layers.0.self_attn.q_proj",
        ),
        (("--method", "gptq", "--skip", "*.experts"), "'*.experts' names no layer"),
        (("--method", "gptq", "--window-length", "2000"), "above the model's context, 1,024 tokens"),
        (("--method", "gptq", "--window-length", "500000"), "tokens, fewer than the 500,000 of one window"),
        (("--method", "gptq", "--calibration", "nowhere.txt"), "nowhere.txt cannot be read as UTF-8 text"),
    ],
)
def test_what_does_not_go_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert run(model, tmp_path / "out", *options) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_dummy_has_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("dummy:tiny", tmp_path / "out", "--method", "int8") == 1
    assert "dummy:tiny has no files" in capsys.readouterr().err
