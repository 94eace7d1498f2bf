"""Which checkpoint the quantization lab takes again, and which it makes anew."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from backend.errors import ConfigError
from backend.experiments.quantization_checkpoints import calibrated_checkpoint
from backend.experiments.quantization_config import parse_variant
from backend.models.sources import ModelSource, resolve_source
from backend.models.store import MANIFEST_NAME, Manifest
from backend.quantization import quantize_model
from tests.helpers import make_tiny_llama


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of the checkpoints that were made, which are empty."""
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    names = []

    def write(source: Any, method: Any, settings: Any, windows: Any, work: Any, **options: Any) -> None:
        work.output.mkdir(parents=True)
        names.append(work.output.name)

    monkeypatch.setattr(quantize_model, "quantize_model", write)
    return names


def tiny(folder: Path) -> ModelSource:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    return resolve_source(str(make_tiny_llama(folder, hidden_size=64, intermediate_size=96, **heads)))


def checkpoint(source: ModelSource, calibration: str | None = None) -> Path | None:
    variant = parse_variant("gptq:group_size=32")
    return calibrated_checkpoint(source, variant, lambda done, total: None, calibration).path


def test_a_change_of_what_quantize_writes_leaves_older_checkpoints_behind(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny(tmp_path / "model")
    first, again = checkpoint(source), checkpoint(source)
    assert first == again
    assert len(made) == 1
    monkeypatch.setattr(quantize_model, "VERSION", quantize_model.VERSION + 1)
    assert checkpoint(source) not in (first, None)
    assert len(set(made)) == 2


def test_each_calibration_text_has_a_checkpoint_of_its_own(tmp_path: Path, made: list[str]) -> None:
    """By what it says, wherever it lies."""
    source, text = tiny(tmp_path / "model"), "word " * 600
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(text)
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": text + "more"}))
    found = [checkpoint(source, str(tmp_path / name)) for name in ("one.txt", "two.txt", "other.jsonl")]
    assert found[0] == found[1] != found[2]
    assert checkpoint(source) not in found
    assert len(made) == 3
    for path, why in (
        ("/nowhere.txt", "/nowhere.txt cannot be read as UTF-8 text"),
        ("~no-such-user/a.txt", "no user has a home"),
    ):
        with pytest.raises(ConfigError, match=why):
            checkpoint(source, path)


def test_a_model_that_is_fetched_anew_has_its_checkpoints_still(tmp_path: Path, made: list[str]) -> None:
    """It is known by the file that it was converted from; a folder of somebody's own by its files' times."""
    own = tiny(tmp_path / "model")
    assert own.path is not None

    def converted(sha256: str) -> ModelSource:
        (tmp_path / "model" / "model.safetensors").touch()
        manifest = Manifest("", None, "", sha256, 1, 1, {})
        (tmp_path / "model" / MANIFEST_NAME).write_text(json.dumps(asdict(manifest)), encoding="utf-8")
        return replace(own, revision=sha256[:12])

    first, again, other = (checkpoint(converted(sha256)) for sha256 in ("a" * 64, "a" * 64, "a" * 63 + "b"))
    assert first == again != other
    unchanged = checkpoint(own)
    assert unchanged == checkpoint(own)
    (tmp_path / "model" / "model.safetensors").touch()
    assert checkpoint(own) != unchanged
    assert len(made) == len(set(made)) == 4
