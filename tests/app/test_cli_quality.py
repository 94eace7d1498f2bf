"""`servelab quality` on models of random weights: the library's figures, and one sentence for what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from app.cli import main
from backend.config import EngineConfig, QuantizationSettings
from backend.experiments.layer_error import measure_layer_errors, scan_sensitivity
from backend.experiments.quality import load_pair, measure_quality
from backend.models import loader
from backend.models.sources import resolve_source
from backend.quantization.fp8 import FP8, FP8Weight
from backend.tokenizer import load_tokenizer
from tests.experiments.planted import plant_outliers
from tests.helpers import make_tiny_llama

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
INT4 = ["--set", "quantization.method=int4", "--set", "quantization.group_size=32"]
# Kind, weights and inputs of dummy:tiny's layers.
FP8_LAYERS = [("qkv", 160 * 64, 64), ("output", 64 * 96, 96), ("gate_up", 320 * 64, 64), ("down", 64 * 160, 160)]
FIGURES = {
    "perplexity",
    "num_tokens",
    "kl",
    "top1_agreement",
    "delta_p",
    "delta_p_standard_error",
    "reference_perplexity",
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def measured(text: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["quality", "dummy:tiny", "--text", str(text), *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_alone_there_is_nothing_to_compare(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = measured(text, capsys, "--max-tokens", "100")
    assert set(shown) >= FIGURES
    assert shown["num_tokens"] == 99
    assert shown["reference"] is None
    assert all(shown[name] is None for name in FIGURES - {"perplexity", "num_tokens"})


def test_the_figures_are_the_librarys(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = measured(text, capsys, *INT4, "--reference", "self", "--window", "64", "--stride", "32")
    source = resolve_source("dummy:tiny")
    quantized = EngineConfig.from_dict({"quantization": {"method": "int4", "group_size": 32}})
    model, reference = load_pair(source, quantized, (source, EngineConfig()))
    token_ids = load_tokenizer(source).encode(TEXT)
    quality = measure_quality(model, token_ids, reference=reference, window=64, stride=32)
    assert quality.kl is not None
    assert shown["perplexity"] == pytest.approx(quality.perplexity)
    assert shown["kl"]["mean"] == pytest.approx(quality.kl.mean, rel=1e-4)
    assert shown["reference_perplexity"] == pytest.approx(quality.reference_perplexity)
    assert shown["quantization"]["bits"] == 4
    assert shown["num_quantized_layers"] == model.loaded.num_quantized_layers > 0
    assert shown["reference"] == "dummy:tiny"


def test_a_reference_can_have_settings_of_its_own(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both alike, so that nothing is left between them."""
    shown = measured(
        text, capsys, *INT4, "--reference", "self", *(part.replace("--set", "--reference-set") for part in INT4)
    )
    assert shown["kl"]["max"] == 0


def test_the_table(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quality", "dummy:tiny", "--text", str(text), "--reference", "self", "--max-tokens", "50"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "Tokens scored" in output
    assert "100.0 %" in output
    assert "0.000 ± 0.000 %" in output


def test_layers_and_what_each_kind_costs(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = measured(text, capsys, *INT4, "--reference", "self", "--window", "100", "--layers", "--sensitivity", "kind")
    source = resolve_source("dummy:tiny")
    quantized = EngineConfig.from_dict({"quantization": {"method": "int4", "group_size": 32}})
    model, reference = load_pair(source, quantized, (source, EngineConfig()))
    token_ids = load_tokenizer(source).encode(TEXT)
    errors = measure_layer_errors(model, reference, token_ids, window=100)
    assert [row["output_error"] for row in shown["layers"]] == pytest.approx([each.output_error for each in errors])
    assert [row["kind"] for row in shown["layers"]] == ["qkv", "output", "gate_up", "down"] * 3
    assert len(shown["layers"][0]["largest_channels"]) == 3
    parts = scan_sensitivity(model, reference, token_ids, "kind", window=100)
    assert [row["part"] for row in shown["sensitivity"]] == ["qkv", "output", "gate_up", "down", "all"]
    assert [row["perplexity"] for row in shown["sensitivity"]] == pytest.approx(
        [part.quality.perplexity for part in parts]
    )
    assert all(row["num_tokens"] == 99 for row in shown["sensitivity"])


def test_what_saturates_in_fp8(text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with scales of their own making have nothing to cut off, until the scales of one matrix are a tenth."""
    arguments = ["--set", "quantization.method=fp8", "--reference", "self", "--layers"]
    shown = measured(text, capsys, *arguments)
    for row, (kind, num_weights, num_inputs) in zip(shown["layers"], 3 * FP8_LAYERS, strict=True):
        assert row["kind"] == kind
        num_activations = (shown["num_tokens"] + 1) * num_inputs
        assert row["saturation"] == {
            "saturated_weights": 0,
            "num_weights": num_weights,
            "saturated_activations": 0,
            "num_activations": num_activations,
        }
    made: list[FP8Weight] = []
    quantize = FP8.quantize

    def shrunk(self: FP8, weight: Tensor) -> FP8Weight:
        packed = quantize(self, weight)
        made.append(packed)
        return packed if len(made) > 1 else replace(packed, scales=packed.scales / 10)

    monkeypatch.setattr(FP8, "quantize", shrunk)
    cut_off = [row["saturation"]["saturated_weights"] for row in measured(text, capsys, *arguments)["layers"]]
    assert cut_off[0] > 0
    assert cut_off[1:] == [0] * 11
    made.clear()
    assert main(["quality", "dummy:tiny", "--text", str(text), *arguments]) == 0
    output = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in output[output.index("Saturated weights") :].splitlines()[2:]]
    num_weights = sum(num_weights for _, num_weights, _ in FP8_LAYERS)
    num_activations = sum(num_inputs for _, _, num_inputs in FP8_LAYERS) * (shown["num_tokens"] + 1)
    assert lines == [
        f"0 qkv {cut_off[0]:,} of {FP8_LAYERS[0][1]:,} 0 of {64 * (shown['num_tokens'] + 1):,}",
        f"all 12 fp8 {cut_off[0]:,} of {3 * num_weights:,} 0 of {3 * num_activations:,}",
    ]
    assert main(["quality", "dummy:tiny", "--text", str(text), *INT4, "--reference", "self", "--layers"]) == 0
    assert "Saturated" not in capsys.readouterr().out
    assert {row["saturation"] for row in measured(text, capsys, *INT4, *arguments[2:])["layers"]} == {None}


def test_outliers_are_named_beside_their_ranges(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    planted = plant_outliers(folder)
    arguments = ["quality", str(folder), "--text", str(text), "--ranges"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    for group, where in (
        ("weights", "layer 2, down, output 5, input 9"),
        ("activations", "layer 2, down, input 11"),
        ("KV", "layer 2, values, head 2, channel 4"),
        ("attention logits", "layer 1, scores, head 4"),
    ):
        (line,) = [line for line in output.splitlines() if line.startswith(f"{group} ") and "layer" in line]
        assert where in line
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ranges"]["model"]
    assert {row["group"]: (row["layer"], row["part"], row["outlier"]) for row in found["groups"]} == planted
    for group, (layer, part, outlier) in planted.items():
        assert [
            row["outlier"]
            for row in found["layers"]
            if (row["group"], row["layer"], row["part"]) == (group, layer, part)
        ] == [outlier]


def test_ranges_and_questions(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without text answers nothing."""
    shown = measured(text, capsys, *INT4, "--reference", "self", "--ranges", "--questions")
    assert set(shown["ranges"]) == {"model", "reference"}
    groups = {"weights", "activations", "KV", "attention logits"}
    for found in shown["ranges"].values():
        assert set(found["order"]) == {group["group"] for group in found["groups"]} == groups
        assert {row["group"] for row in found["layers"]} == groups
    largest = [found["groups"][0]["max_abs"] for found in shown["ranges"].values()]
    assert largest[0] != largest[1]
    assert shown["exact_match"] == {"model": 0, "reference": 0, "num_questions": 40}
    assert [len(answers) for answers in shown["answers"].values()] == [40, 40]


def test_all_tables(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*INT4, "--reference", "self", "--layers", "--sensitivity", "layer", "--ranges", "--questions"]
    assert main(["quality", "dummy:tiny", "--text", str(text), *arguments, "--max-tokens", "50"]) == 0
    output = capsys.readouterr().out
    for shown in ("Delta p", "Largest channels", "layers.2.mlp.down", "Values of the reference", "0 of 40"):
        assert shown in output


def test_a_quantized_checkpoint_is_not_its_own_reference(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stored in fewer bits loads so whatever the settings say."""
    load_model, settings = loader.load_model, QuantizationSettings(method="int8")
    monkeypatch.setattr(
        loader, "load_model", lambda *source, **options: load_model(*source, **options | {"quantization": settings})
    )
    assert main(["quality", "dummy:tiny", "--text", str(text), "--reference", "self"]) == 1
    assert "dummy:tiny is a quantized checkpoint, which cannot be its own reference" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers"], "compare with a reference"),
        (["--sensitivity", "kind"], "compare with a reference"),
        (["--layers", "--reference", "self"], "has no quantized layer to look at"),
        (["--window", "5000"], "a window of 5,000 tokens is above the context of dummy:tiny"),
        (["--window", "10", "--stride", "11"], "a stride of 11 tokens is impossible"),
        (["--stride", "0"], "a stride of 0 tokens is impossible"),
        (["--max-tokens", "1"], "1 tokens are too few to read"),
        (["--reference-set", "model.dtype=bfloat16"], "no meaning without --reference"),
        (["--reference", "dummy:none"], "there is no dummy shape"),
        (["--set", "quantization.method=int5"], "quantization.method = 'int5'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    text: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["quality", "dummy:tiny", "--text", str(text), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_reference_with_other_tokens(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many, but the words are cut otherwise."""
    folder = make_tiny_llama(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["T"], vocabulary["h"] = vocabulary["h"], vocabulary["T"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["quality", "dummy:tiny", "--text", str(text), "--reference", str(folder)]) == 1
    assert f"dummy:tiny and its reference {folder} have other tokens for this text" in capsys.readouterr().err


def test_a_text_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", "dummy:tiny", "--text", str(tmp_path / "none.txt")]) == 1
    assert "cannot be read as UTF-8 text" in capsys.readouterr().err
