"""The quantization lab against the measures that it calls, called alone, and what becomes of failures and of a cancel."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.experiments import quantization_checkpoints, quantization_lab
from backend.experiments.layer_error import measure_layer_errors
from backend.experiments.quality import load_pair, measure_quality
from backend.experiments.quantization_config import QuantizationLabConfig
from backend.experiments.quantization_lab import DEFAULT_TEXT, LAYER_TOKENS, check_lab
from backend.models.sources import resolve_source
from backend.quantization.single_layer import SingleLayer
from backend.tokenizer import load_tokenizer
from tests.experiments.quantizing import SHAPE, TOKENS, Sink, run
from tests.helpers import make_tiny_llama


def ids() -> list[int]:
    return load_tokenizer(resolve_source("dummy:tiny")).encode(DEFAULT_TEXT.read_text(encoding="utf-8"))[:TOKENS]


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("int4:zero_point=integer", {"quantization.method": "int4", "quantization.zero_point": "integer"}),
        ("nf4", {"quantization.method": "nf4"}),
        ("none:kv=int8", {"cache.dtype": "int8"}),
        ("int8:kv=int4", {"quantization.method": "int8", "cache.dtype": "int4"}),
    ],
)
def test_figures_are_those_of_the_measures_alone(variant: str, settings: dict[str, str]) -> None:
    end, (reference, row) = run([variant])
    assert (end.status, end.error) == ("finished", None)
    source = resolve_source("dummy:tiny")
    model, other = load_pair(source, EngineConfig().with_overrides(settings), (source, EngineConfig()))
    assert other is not None
    quality = measure_quality(model, ids(), reference=other)
    assert quality.kl is not None
    expected = {
        "perplexity": quality.perplexity,
        "num_tokens": TOKENS - 1,
        "kl_mean": quality.kl.mean,
        "kl_p50": quality.kl.p50,
        "kl_p99": quality.kl.p99,
        "kl_max": quality.kl.max,
        "top1_agreement": quality.top1_agreement,
        "delta_p": quality.delta_p,
        "delta_p_standard_error": quality.delta_p_standard_error,
        "weights_bytes": model.loaded.weights_bytes,
        "kv_bytes_per_token": model.shape.group.bytes_per_token,
        "emulated": model.loaded.emulated_quantization,
    }
    assert {name: row[name] for name in expected} == expected
    assert (reference["variant"], reference["perplexity"]) == ("reference", quality.reference_perplexity)
    assert reference["bits_per_weight"] == 32
    assert "kl_mean" not in reference
    if "quantization.method" in settings:
        errors = measure_layer_errors(model, other, ids(), max_tokens=LAYER_TOKENS)
        assert row["layers"] == [asdict(error) for error in errors]
        assert row["settings"]["quantization"] == model.loaded.quantization.to_dict()
        # Layers of 16 x 6 x 64 + 2 x 32 x 64, 64 x 96, 320 x 64 and 64 x 160 weights, each with its own bits.
        sizes = {"qkv": 160 * 64, "output": 64 * 96, "gate_up": 320 * 64, "down": 64 * 160}
        num_bits = sum(error.bits_per_weight * sizes[error.kind] for error in errors)
        assert row["bits_per_weight"] == pytest.approx(num_bits / (3 * sum(sizes.values())))
    else:
        assert "layers" not in row
    assert row["settings"]["cache"] == {"dtype": settings.get("cache.dtype", "auto")}


def test_a_text_longer_than_a_window_is_compared_with_the_reference_of_each_window(tmp_path: Path) -> None:
    """The reference's states are remembered from variant to variant: each window must find its own.

    A token is a letter, and both windows begin with the same ones.
    """
    text = tmp_path / "text.txt"
    text.write_text("ab" * 512 + "abcd" * 200)
    _, (_, *rows) = run(["int8", "nf4"], max_tokens=1500, text=str(text))
    source = resolve_source("dummy:tiny")
    token_ids = load_tokenizer(source).encode(text.read_text())[:1500]
    assert token_ids[:2] == token_ids[1024:1026]
    for row in rows:
        config = EngineConfig().with_overrides({"quantization.method": row["variant"]})
        model, other = load_pair(source, config, (source, EngineConfig()))
        quality = measure_quality(model, token_ids, reference=other)
        assert quality.kl is not None
        assert quality.num_tokens == 1498
        assert (row["kl_mean"], row["perplexity"]) == (quality.kl.mean, quality.perplexity)


def test_speeds_are_measured_where_a_kernel_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether one does is the model's to say."""
    end, rows = run(["none:kv=int8", "nf4"], speed=True)
    assert end.status == "finished"
    assert [row["emulated"] for row in rows] == [False, False, True]
    names = ("prefill_tok_s", "decode_1_tok_s", "decode_32_tok_s", "peak_memory_bytes")
    for row in rows[:2]:
        assert all(row[name] > 0 for name in names)
    assert not any(name in rows[2] for name in names)


def test_a_variant_that_fails_keeps_the_others() -> None:
    end, rows = run(["gptq", "int4:group_size=48", "int8"])
    assert [row["variant"] for row in rows] == ["reference", "gptq", "int4:group_size=48", "int8"]
    assert rows[1]["problem"] == "dummy:tiny has no files to make a checkpoint of by gptq; name a model that has"
    assert "group_size = 48" in rows[2]["problem"]
    assert rows[3]["kl_mean"] > 0
    assert end.status == "failed"
    assert end.error is not None
    assert end.error.startswith("gptq: dummy:tiny has no files")
    assert "int4 g48: " in end.error


def test_what_nobody_expected_is_a_failure_of_its_variant_too(monkeypatch: pytest.MonkeyPatch) -> None:
    load = quantization_lab.load_text_model

    def fail(source: Any, config: EngineConfig) -> Any:
        if config.quantization.method == "fp8":
            raise RuntimeError("a kernel broke")
        return load(source, config)

    monkeypatch.setattr(quantization_lab, "load_text_model", fail)
    end, rows = run(["fp8", "int8"])
    assert (end.status, rows[1]["problem"]) == ("failed", "RuntimeError: a kernel broke")
    assert rows[2]["perplexity"] > 0


def test_a_cancelled_run_keeps_what_it_has() -> None:
    cancel = threading.Event()
    sink = Sink(lambda phase: cancel.set() if phase.name.startswith("nf4: scoring") else None)
    end, rows = run(["int8", "nf4", "fp8"], sink, cancel=cancel)
    assert (end.status, end.error) == ("cancelled", None)
    assert [row["variant"] for row in rows] == ["reference", "int8"]


def test_progress_names_the_variant_and_never_goes_back() -> None:
    sink = Sink()
    run(["int8", "nf4"], sink)
    places = [phase.done for phase in sink.phases]
    assert places == sorted(places, key=lambda place: place or 0)
    assert {phase.name.partition(":")[0] for phase in sink.phases} == {"dummy", "int8", "nf4"}
    assert {phase.total for phase in sink.phases} == {3}
    assert sink.start is not None
    assert sink.start.load["num_tokens"] == TOKENS
    assert sink.start.resolved_config["variants"] == ["int8", "nf4"]


def test_calibrated_checkpoints_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(quantization_checkpoints, "NUM_WINDOWS", 2)
    monkeypatch.setattr(quantization_checkpoints, "WINDOW_LENGTH", 64)
    folder = make_tiny_llama(tmp_path / "model", **SHAPE)
    sink = Sink()
    variants = ["gptq:group_size=32", "awq:group_size=32", "int4:group_size=32,zero_point=integer"]
    end, (_, gptq, awq, rounded) = run(variants, sink, model=str(folder))
    assert (end.status, end.error) == ("finished", None)
    assert any("choosing codes" in phase.name for phase in sink.phases)
    assert gptq["bits_per_weight"] == awq["bits_per_weight"] == rounded["bits_per_weight"] == 4.75
    assert len({gptq["kl_mean"], awq["kl_mean"], rounded["kl_mean"]}) == 3
    assert [len(row["layers"]) for row in (gptq, awq, rounded)] == [12, 12, 12]
    made = sorted((tmp_path / "home" / "models" / ".quantized").iterdir())
    assert [str(path) for path in made] == sorted([gptq["checkpoint"], awq["checkpoint"]])
    again = Sink()
    _, (_, repeated) = run(variants[:1], again, model=str(folder))
    assert not any("choosing codes" in phase.name for phase in again.phases)
    assert (repeated["checkpoint"], repeated["kl_mean"]) == (gptq["checkpoint"], gptq["kl_mean"])
    end, (_, other) = run(["gptq:group_size=32,bits=3"], model=str(folder))
    assert other["checkpoint"] not in (gptq["checkpoint"], awq["checkpoint"])
    with pytest.raises(ConfigError, match="is a quantized checkpoint; name the model that it was made of"):
        run(["int8"], model=gptq["checkpoint"])


_KILLED = """
import json, os, signal, sys, threading
from backend.experiments import quantization_checkpoints
from backend.experiments.quantization_config import QuantizationLabConfig
from backend.experiments.quantization_lab import run_lab
from tests.experiments.quantizing import Sink

def die(phase):
    if phase.name.startswith("awq") and "choosing codes 67%" in phase.name:  # two of three layers are written
        os.kill(os.getpid(), signal.SIGKILL)

quantization_checkpoints.NUM_WINDOWS, quantization_checkpoints.WINDOW_LENGTH = 2, 64
run_lab(QuantizationLabConfig.from_dict(json.loads(sys.argv[1])), Sink(die), lambda result: None, threading.Event())
"""


def test_a_killed_run_leaves_its_checkpoints_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gptq is taken as it is, awq goes on behind its last layer, and what comes of it is what an undisturbed run makes."""
    monkeypatch.setattr(quantization_checkpoints, "NUM_WINDOWS", 2)
    monkeypatch.setattr(quantization_checkpoints, "WINDOW_LENGTH", 64)
    model = str(make_tiny_llama(tmp_path / "model", **SHAPE))
    variants = ["gptq:group_size=32", "awq:group_size=32"]
    settings = {"model": model, "variants": variants, "max_tokens": TOKENS, "layers": False, "speed": False}
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    killed = subprocess.run([sys.executable, "-c", _KILLED, json.dumps(settings)], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    chosen: list[int] = []
    load = SingleLayer.load

    def counted(self: SingleLayer, index: int, read: Any) -> None:
        chosen.append(index)
        load(self, index, read)

    with monkeypatch.context() as patch:
        patch.setattr(SingleLayer, "load", counted)
        sink = Sink()
        end, (_, gptq, awq) = run(variants, sink, model=model, layers=False)
    assert (end.status, end.error) == ("finished", None)
    assert not any(phase.name.startswith("gptq") and "choosing codes" in phase.name for phase in sink.phases)
    assert chosen == [2]
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "undisturbed"))
    _, (_, *whole) = run(variants, model=model, layers=False)
    for resumed, expected in zip((gptq, awq), whole, strict=True):
        assert contents(resumed["checkpoint"]) == contents(expected["checkpoint"])
    assert sorted(path.name for path in (tmp_path / "home" / "models" / ".quantized").iterdir()) == sorted(
        Path(row["checkpoint"]).name for row in (gptq, awq)
    )


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_what_cannot_be_measured_is_said_before(tmp_path: Path) -> None:
    binary = tmp_path / "text.bin"
    binary.write_bytes(b"\xff\xfe")
    for text in (str(binary), str(tmp_path / "none.txt"), f"{tmp_path}/a\0b"):
        with pytest.raises(ConfigError, match="cannot be read as UTF-8 text") as refused:
            check_lab(QuantizationLabConfig.from_dict({"model": "dummy:tiny", "text": text}))
        assert str(refused.value).isprintable()
