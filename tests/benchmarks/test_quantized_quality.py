"""The benchmark of what fewer bits cost in quality: on a model of random weights, and what it demands of results."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from backend.config import EngineConfig
from backend.experiments.quality import load_pair, measure_quality
from backend.experiments.quantization_config import parse_variant
from backend.models.sources import resolve_source
from backend.tokenizer import load_tokenizer
from benchmarks import quality_table, table
from benchmarks.quantized_quality import main, requirements, variants
from tests.helpers import make_tiny_llama

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 64, "intermediate_size": 160}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a model and texts, and what came of all variants."""
    folder = tmp_path_factory.mktemp("benchmark")
    make_tiny_llama(folder / "model", **SHAPE)
    (folder / "test.txt").write_text("What is read here was never seen before. " * 4, encoding="utf-8")
    (folder / "valid.txt").write_text(
        "A text of some words, to calibrate with; it is another one. " * 8, encoding="utf-8"
    )
    sizes = ["--group-size", "32", "--windows", "4", "--window-length", "64", "--max-tokens", "100", "--device", "cpu"]
    texts = ["--text", str(folder / "test.txt"), "--calibration", str(folder / "valid.txt")]
    arguments = [*texts, "--model", str(folder / "model"), *sizes, "--threads", "1", "--commit", "0123456789"]
    with suppress(SystemExit):  # on random weights and this text a method may well be no better than another
        main([*arguments, "-o", str(folder / "result.json")])
    return folder, json.loads((folder / "result.json").read_text(encoding="utf-8"))


def test_every_variant_has_the_figures_of_the_measures_alone(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, result = measured
    rows = {row["variant"]: row for row in result["results"]}
    assert list(rows) == ["reference", *variants(32)]
    assert not any("problem" in row for row in rows.values())
    source = resolve_source(str(folder / "model"))
    token_ids = load_tokenizer(source).encode((folder / "test.txt").read_text())[:100]
    for variant in ("nf4", "int4:group_size=-1,zero_point=integer"):
        config = parse_variant(variant).engine_config(str(folder / "model"))
        model, reference = load_pair(source, config, (source, EngineConfig()))
        quality = measure_quality(model, token_ids, reference=reference)
        assert quality.kl is not None
        row = rows[variant]
        assert (row["perplexity"], row["kl_mean"], row["num_tokens"]) == (quality.perplexity, quality.kl.mean, 99)
        assert row["weights_bytes"] == model.loaded.weights_bytes
        assert rows["reference"]["perplexity"] == quality.reference_perplexity
    for grid in ("group_size=32,zero_point=integer", "group_size=-1,zero_point=integer"):
        sizes = {(rows[f"{method}:{grid}"]["bits_per_weight"]) for method in ("int4", "gptq", "awq")}
        assert len(sizes) == 1
        assert len({rows[f"{method}:{grid}"]["kl_mean"] for method in ("int4", "gptq", "awq")}) == 3
    assert result["requirements"] == requirements(result["results"], 32)
    assert (result["text"], result["calibration"], result["card"]) == ("test.txt", "valid.txt", None)


def rows(**changes: float) -> list[dict[str, Any]]:
    """Results in which everything holds, but for changes of perplexities."""
    perplexities = {"reference": 20.0, "int8": 20.05, "fp8": 19.95, "int4": 22.0, "gptq": 21.0, "awq": 21.5} | changes
    return [
        {"variant": variant, "bits_per_weight": 4.375, "perplexity": perplexities[variant.partition(":")[0]]}
        for variant in ["reference", *variants(64)]
        if variant.partition(":")[0] in perplexities
    ]


def missed(results: list[dict[str, Any]]) -> list[str]:
    return [each["what"] for each in requirements(results, 64) if not each["holds"]]


def test_what_has_to_hold() -> None:
    assert len(requirements(rows(), 64)) == 3 * 2 + 2
    assert missed(rows()) == []
    assert len(missed(rows(gptq=22.0))) == 3, "as good is not better"
    assert [what.partition(" ")[0] for what in missed(rows(awq=23.0, int8=20.11))] == ["awq"] * 3 + ["int8"]
    assert missed(rows(fp8=19.89)) == ["fp8 within 0.5% of float32"], "far below is as wrong as far above"
    larger = [row | ({"bits_per_weight": 4.5} if row["variant"].startswith("awq") else {}) for row in rows()]
    assert len(missed(larger)) == 3, "with more bytes it is no contest"
    failed = [{"variant": "int8", "problem": "no"} if row["variant"] == "int8" else row for row in rows()]
    assert missed(failed) == ["int8 within 0.5% of float32"]


def test_the_table() -> None:
    row = {"bits_per_weight": 32.0, "weights_bytes": 512 * 2**20, "perplexity": 20.0, "num_tokens": 1023}
    few = {"bits_per_weight": 4.375, "weights_bytes": 160 * 2**20, "perplexity": 21.0, "num_tokens": 1023}
    result = {
        "model": "m",
        "text": "test.txt",
        "calibration": "valid.txt",
        "card": None,
        "date": "2026-12-01",
        "commit": "0123456789",
        "environment": {"cpu": "A CPU", "versions": {"torch": "2.11"}},
        "options": {"windows": 128, "window_length": 512},
        "results": [
            {"variant": "reference", **row},
            {"variant": "awq:bits=3,group_size=64", **few, "kl_mean": 0.05, "top1_agreement": 0.9},
            {"variant": "fp8", "problem": "RuntimeError: no"},
        ],
        "requirements": [{"what": "awq is better", "holds": True}, {"what": "fp8 is near", "holds": False}],
    }
    assert quality_table.markdown([result]).splitlines() == [
        "m, 1,023 tokens of test.txt; gptq and awq calibrated on 128 × 512 tokens of valid.txt. A CPU, torch 2.11, "
        "2026-12-01, commit 0123456.",
        "",
        "| weights | bits per weight | size | perplexity | over float32 | KL, nats | same first choice |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| float32 | 32.00 | 512 MiB | 20.000 | – | – | – |",
        "| awq 3 bits g64 | 4.38 | 160 MiB | 21.000 | +5.00% | 0.0500 | 90.0% |",
        "| fp8 | – | – | – | – | – | – |",
        "",
        "What does not hold: fp8 is near.",
    ]
    text = quality_table.text_table(result)
    assert "RuntimeError: no" in text
    assert text.splitlines()[-2:] == ["holds  awq is better", "FAILS  fp8 is near"]


NOTE = (
    "int8 takes 8.71 bits per weight beside 8.05 of w8a8_int8 because its codes come in chunks of 128 inputs on CUDA, so that "
    "576 inputs take room for 640."
)


@pytest.mark.parametrize(
    ("card", "bits", "notes"),
    [
        ("NVIDIA H200", {"int8": 8.7135, "w8a8_int8": 8.0469}, [NOTE]),
        ("NVIDIA H200", {"int8": 8.0469, "w8a8_int8": 8.0469}, []),  # a model of multiples of 128 inputs
        (None, {"int8": 8.7135, "w8a8_int8": 8.0469}, []),
        ("NVIDIA H200", {"int8": 8.7135}, []),
        ("NVIDIA H200", {"int8": None, "w8a8_int8": 8.0469}, []),  # it failed
    ],
)
def test_why_int8_takes_more_is_said_where_it_does(
    card: str | None, bits: dict[str, float | None], notes: list[str]
) -> None:
    common = {"weights_bytes": 2**20, "perplexity": 20.0, "num_tokens": 1023, "kl_mean": 0.05, "top1_agreement": 0.9}
    result = {
        "model": "m",
        "text": "test.txt",
        "calibration": "valid.txt",
        "card": card,
        "date": "2026-12-01",
        "commit": None,
        "environment": {"cpu": "A CPU", "versions": {"torch": "2.11"}},
        "options": {"windows": 128, "window_length": 512},
        "results": [
            {"variant": variant, "problem": "no"}
            if size is None
            else {"variant": variant, "bits_per_weight": size} | common
            for variant, size in bits.items()
        ],
        "requirements": [{"what": "fp8 is near", "holds": False}],
    }
    said = [line for note in notes for line in ("", note)]
    lines = quality_table.markdown([result]).splitlines()
    assert lines[4 + len(bits) :] == [*said, "", "What does not hold: fp8 is near."]
    text = quality_table.text_table(result).splitlines()
    assert text[3 + len(bits) :] == [*said, "", "FAILS  fp8 is near"]


def test_the_readme_shows_the_stored_results() -> None:
    text = table.README.read_text(encoding="utf-8")
    shown = quality_table.markdown(quality_table.load_results(table.RESULTS))
    assert table.replace_between_markers(text, shown, quality_table.BEGIN, quality_table.END) == text, (
        "run python -m benchmarks.table"
    )
