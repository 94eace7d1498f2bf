"""`servelab kv-quality` on a model of random weights: the library's figures, and one sentence for what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli import main
from backend.experiments import kv_quality
from backend.experiments.kv_quality import measure_model_kv_quality
from backend.models.sources import resolve_source
from backend.tokenizer import load_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_the_figures_are_the_librarys(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-quality", str(text), "--model", "dummy:tiny", "--length", "140", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    source = resolve_source("dummy:tiny")
    quality, _ = measure_model_kv_quality(source, load_tokenizer(source).encode(TEXT), device="cpu", lengths=[140])
    assert list(shown["divergences"]) == ["fp8_e4m3", "int8", "int4"]
    for name, (row,) in shown["divergences"].items():
        assert row["num_tokens"] == 140
        assert row["mean"] == pytest.approx(quality.divergences[name][0].mean, rel=1e-4)


def test_a_broken_head_is_named(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_quality, "LARGEST_ERROR", 0.0)
    assert main(["kv-quality", str(text), "--model", "dummy:tiny", "--length", "140"]) == 0
    output = capsys.readouterr()
    assert "int4" in output.out
    assert "warning: layer 0, KV head 0: int4 keys err by" in output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "5000"], "above the context of dummy:tiny"),
        (["--length", "1000"], "the text has"),
        (["--length", "128"], "more than 128 are needed"),
        (["--length", "140", "--model", "dummy:tiny-windows"], "attends within a window"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    text: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["kv-quality", str(text), "--model", "dummy:tiny", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_text_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-quality", str(tmp_path / "none.txt"), "--model", "dummy:tiny"]) == 1
    assert "cannot be read as UTF-8 text" in capsys.readouterr().err
