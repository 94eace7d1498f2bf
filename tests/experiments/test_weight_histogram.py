"""Weights on a method's grid, against the values that the quantized layer of the loaded model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend.config import EngineConfig, QuantizationSettings
from backend.errors import ConfigError
from backend.experiments.layer_error import KINDS, dense_weight
from backend.experiments.quantization_config import parse_variant
from backend.experiments.text_pass import load_text_model
from backend.experiments.weight_histogram import _on_grid, _weight, weight_histogram
from backend.models.model_config import load_decoder_config
from backend.models.sources import resolve_source
from backend.quantization.methods import make_method
from tests.helpers import make_tiny_llama

VARIANTS = (
    "int8",
    "int4:group_size=32,zero_point=none",
    "int4:group_size=32,zero_point=integer",
    "int4:group_size=32,zero_point=float",
    "int4:bits=2,group_size=-1,zero_point=float",
    "nf4:group_size=32",
    "fp8",
    "fp8:granularity=tensor",
    "w8a8_int8",
    "llm_int8:threshold=6",
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_method_makes_of_a_weight_lies_on_its_levels(variant: str) -> None:
    """Each quantized weight, put in the same scale, is one of the levels; the nearest of them where nothing saturates."""
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    method = make_method(parse_variant(variant).quantization.with_overrides(_filled(variant)))
    assert method is not None
    packed = method.quantize(weight)
    placed, _, levels, _ = _on_grid(weight, packed)
    stored, _, _, _ = _on_grid(packed.dequantize(), packed)
    grid = torch.tensor(levels, dtype=torch.float64)
    assert grid.tolist() == sorted(grid.tolist())
    tolerance = 4e-6 * float(grid.abs().max())
    assert float((stored.double()[..., None] - grid).abs().amin(-1).max()) < tolerance
    nearest = grid[(placed.double()[..., None] - grid).abs().argmin(-1)]
    assert float(((nearest - stored).abs() < tolerance).double().mean()) > 0.98


def _filled(variant: str) -> dict[str, object]:
    """What the loader fills in."""
    settings = parse_variant(variant).quantization
    if settings.method == "int4":
        return {"bits": settings.bits or 4}
    return {"granularity": settings.granularity or "channel"} if settings.method == "fp8" else {}


def test_counts_are_of_the_layers_weights(tmp_path: Path) -> None:
    folder = make_tiny_llama(
        tmp_path, hidden_size=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=96
    )
    source = resolve_source(str(folder))
    model = load_text_model(source, EngineConfig())
    for kind, module in KINDS.items():
        own = dense_weight(model.loaded.model.get_submodule(f"layers.1.{module}"), torch.float32)
        torch.testing.assert_close(_weight(source, load_decoder_config(folder), 1, module), own, rtol=0, atol=0)
        found = weight_histogram(source, QuantizationSettings(method="int8"), 1, kind)
        largest = own.abs().amax(1, keepdim=True)
        codes = own / (largest / 127.5) + 128
        assert sum(found.counts) == found.num_weights == own.numel()
        assert (found.edges[0], found.edges[-1]) == (
            pytest.approx(float(codes.min()), abs=1e-3),
            pytest.approx(float(codes.max()), abs=1e-3),
        )
        middle = sum(count for edge, count in zip(found.edges, found.counts, strict=False) if edge < 128)
        assert middle == pytest.approx(int((codes < 128).sum()), abs=own.numel() // 40)
        assert found.levels == tuple(range(256))


def test_a_model_without_files_has_weights_as_it_is_loaded() -> None:
    source = resolve_source("dummy:tiny")
    model = load_text_model(source, EngineConfig())
    own = dense_weight(model.loaded.model.get_submodule("layers.2.mlp.down"), torch.float32)
    found = weight_histogram(source, QuantizationSettings(method="nf4"), 2, "down")
    assert (found.num_weights, found.group_size, found.zero_steps) == (own.numel(), 32, 0)
    assert len(found.levels) == 16


def test_a_layer_that_is_not_there_is_named() -> None:
    source = resolve_source("dummy:tiny")
    for layer, kind in ((3, "down"), (-1, "down"), (0, "head")):
        with pytest.raises(ConfigError, match=f"has no layer {layer}, {kind}; there are 0 to 2, qkv, output"):
            weight_histogram(source, QuantizationSettings(method="int8"), layer, kind)
