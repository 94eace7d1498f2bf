"""Known fault QZ-2 in a model: heads whose keys or values are always 0, over quantized KV caches."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.config import EngineConfig
from backend.experiments.kv_quality import measure_model_kv_quality
from backend.experiments.text_pass import load_text_model
from backend.models.sources import ModelSource
from tests.helpers import make_tiny_llama
from tests.kernels.kv_oracle import FORMATS, decoded

CHANNEL = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layer 1 has keys that are always 0, and values with a zero channel and a zero head."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][:] = 0.0
    values = tensors["model.layers.1.self_attn.v_proj.weight"].view(3, 8, 72)
    values[0, CHANNEL], values[2] = 0.0, 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_model_with_dead_heads(kv_format: str, folder: Path) -> None:
    config = EngineConfig().with_overrides({"cache.dtype": kv_format})
    model = load_text_model(ModelSource(str(folder), "folder", path=folder), config)
    caches = model.allocate(60)
    ids = torch.randint(0, 512, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        logits = model.decoder.compute_logits(model.run(ids, caches))
    assert logits.isfinite().all()
    cache = caches[1]
    keys, values = decoded(cache.key_cache, cache.key_scales), decoded(cache.value_cache, cache.value_scales)
    assert not keys.any()
    assert not values[:, :, 2].any()
    if kv_format != "int4":
        assert not values[:, :, 0, CHANNEL].any()
    assert values[:, :, 1].any()


def test_dead_heads_have_no_figures_that_are_no_numbers(folder: Path) -> None:
    source = ModelSource(str(folder), "folder", path=folder)
    ids = torch.randint(0, 512, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    quality, _ = measure_model_kv_quality(source, ids, device="cpu", lengths=(200,))
    json.dumps(asdict(quality), allow_nan=False)
    dead = [head for head in quality.heads if head.outlier_ratio is None]
    assert [(head.layer, head.kv_head) for head in dead] == [(1, 0), (1, 1), (1, 2)]
    assert all(error is None for head in dead for error in head.errors.values())
    assert not any(warning.startswith("layer 1,") for warning in quality.warnings())
    assert quality.divergences["int8"][0].mean < 0.01
