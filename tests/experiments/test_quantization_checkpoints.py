"""Which checkpoint the quantization lab takes again, and which it makes anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.experiments.quantization_checkpoints import calibrated_checkpoint
from backend.experiments.quantization_config import parse_variant
from backend.models.sources import resolve_source
from backend.quantization import quantize_model
from tests.helpers import make_tiny_llama


def test_a_change_of_what_quantize_writes_leaves_older_checkpoints_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    made = []

    def write(source: Any, method: Any, settings: Any, windows: Any, work: Any, **options: Any) -> None:
        work.output.mkdir(parents=True)
        made.append(work.output.name)

    monkeypatch.setattr(quantize_model, "quantize_model", write)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    source = resolve_source(str(make_tiny_llama(tmp_path / "model", hidden_size=64, intermediate_size=96, **heads)))
    variant = parse_variant("gptq:group_size=32")

    def checkpoint() -> Path | None:
        return calibrated_checkpoint(source, variant, lambda done, total: None).path

    first, again = checkpoint(), checkpoint()
    assert first == again
    assert len(made) == 1
    monkeypatch.setattr(quantize_model, "VERSION", quantize_model.VERSION + 1)
    assert checkpoint() not in (first, None)
    assert len(set(made)) == 2
