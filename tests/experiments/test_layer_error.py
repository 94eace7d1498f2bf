"""Errors of layers against transformers' model in float64, and the scan against models with the other layers skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.experiments.layer_error import KINDS, measure_layer_errors, scan_sensitivity
from backend.experiments.quality import Quality, measure_quality
from backend.experiments.text_pass import TextModel, load_text_model
from backend.models.sources import ModelSource
from backend.quantization.int_weight import quantize_by_rounding
from tests.helpers import load_oracle, make_tiny_llama

IDS = torch.randint(0, 512, (100,), generator=torch.Generator().manual_seed(2)).tolist()
# Of layers with 64 and 160 inputs, and biases.
SHAPE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 64,
    "intermediate_size": 160,
    "attention_bias": True,
}
INT4 = {"quantization.method": "int4", "quantization.group_size": 32, "quantization.zero_point": "integer"}
PROJECTIONS = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "output": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), **SHAPE)


def load(folder: Path, **overrides: Any) -> TextModel:
    source = ModelSource(str(folder), "folder", path=folder)
    return load_text_model(source, EngineConfig().with_overrides(overrides))


@pytest.fixture(scope="module")
def reference(folder: Path) -> TextModel:
    return load(folder)


@pytest.fixture(scope="module")
def quantized(folder: Path) -> TextModel:
    return load(folder, **INT4)


@torch.inference_mode()
def layer_inputs(oracle: Any, token_ids: list[int], window: int) -> dict[str, Tensor]:
    """float64 [num_tokens, in_features] of each projection, over windows that do not overlap."""
    parts: dict[str, list[Tensor]] = {}
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: parts.setdefault(name, []).append(inputs[0][0].clone())
            )
    for start in range(0, len(token_ids), window):
        oracle(torch.tensor([token_ids[start : start + window]]), use_cache=False)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def test_errors_are_those_of_transformers_layers_in_float64(
    folder: Path, quantized: TextModel, reference: TextModel
) -> None:
    oracle = load_oracle(folder)
    weights = {name: parameter.detach().clone() for name, parameter in oracle.named_parameters()}
    inputs = layer_inputs(oracle.double(), IDS, 60)
    errors = measure_layer_errors(quantized, reference, IDS, window=60)
    assert [(error.layer, error.kind) for error in errors] == [(layer, kind) for layer in range(3) for kind in KINDS]
    for error in errors:
        names = [f"model.layers.{error.layer}.{name}" for name in PROJECTIONS[error.kind]]
        weight = torch.cat([weights[f"{name}.weight"] for name in names])
        change = weight.double() - quantize_by_rounding(weight, 4, 32, "integer").dequantize().double()
        x = inputs[names[0]]
        signal = x @ weight.double().T
        assert error.output_error == pytest.approx(float((x @ change.T).norm() / signal.norm()), rel=1e-4)
        assert error.weight_error == pytest.approx(float(change.norm() / weight.double().norm()), rel=1e-6)
        assert error.bits_per_weight == 4 + 24 / 32  # a step in 16 bits and a zero point in 8 for 32 weights
        sizes = x.square().mean(dim=0).sqrt()
        ratios = (sizes / sizes.median()).sort(descending=True)
        assert [channel.channel for channel in error.largest_channels] == ratios.indices[:3].tolist()
        assert [channel.ratio for channel in error.largest_channels] == pytest.approx(
            ratios.values[:3].tolist(), rel=1e-4
        )


def test_a_channel_that_stands_out_is_named(folder: Path) -> None:
    """Channel 7 of layer 1's norm before its MLP is 50 times as large; nothing else changes there."""
    models = [load(folder, **INT4), load(folder)]
    for model in models:
        model.loaded.model.layers[1].mlp_norm.weight.data[7] *= 50  # type: ignore[union-attr,index,operator]
    errors = {(error.layer, error.kind): error for error in measure_layer_errors(*models, IDS)}
    worst = errors[1, "gate_up"].largest_channels
    assert worst[0].channel == 7
    assert worst[0].ratio is not None
    assert worst[0].ratio > 20
    assert worst[1].ratio is not None
    assert worst[1].ratio < 5


def test_layers_left_out_are_not_listed(folder: Path, reference: TextModel) -> None:
    partly = load(folder, **INT4, **{"quantization.skip": ["model.layers.0.*", "*.down_proj"]})
    errors = measure_layer_errors(partly, reference, IDS, max_tokens=10)
    assert [(error.layer, error.kind) for error in errors] == [
        (layer, kind) for layer in (1, 2) for kind in ("qkv", "output", "gate_up")
    ]


def assert_same(measured: Quality, expected: Quality) -> None:
    assert measured.kl is not None
    assert expected.kl is not None
    assert measured.num_tokens == expected.num_tokens
    assert measured.perplexity == pytest.approx(expected.perplexity, rel=1e-6)
    assert measured.kl.mean == pytest.approx(expected.kl.mean, rel=1e-4)
    assert measured.kl.max == pytest.approx(expected.kl.max, rel=1e-4)


def with_skip(folder: Path, reference: TextModel, skip: list[str]) -> Quality:
    model = load(folder, **INT4, **{"quantization.skip": skip})
    return measure_quality(model, IDS, reference=reference, window=80, stride=80, max_tokens=80)


def test_a_kind_is_the_model_with_all_other_kinds_skipped(
    folder: Path, quantized: TextModel, reference: TextModel
) -> None:
    scan = scan_sensitivity(quantized, reference, IDS, "kind", window=80)
    assert [(row.part, row.num_layers) for row in scan] == [*((kind, 3) for kind in KINDS), ("all", 12)]
    for row in scan:
        others = [kind for kind in KINDS if row.part not in (kind, "all")]
        skip = [f"*.{name}" for kind in others for name in PROJECTIONS[kind]]
        assert_same(row.quality, with_skip(folder, reference, skip))
    means = [row.quality.kl.mean for row in scan if row.quality.kl]
    assert len({f"{mean:.3e}" for mean in means}) == 5  # each part has its own
    assert min(means) > 0


def test_a_layer_is_the_model_with_all_others_skipped(folder: Path, quantized: TextModel, reference: TextModel) -> None:
    scan = {row.part: row for row in scan_sensitivity(quantized, reference, IDS, "layer", window=80)}
    assert len(scan) == 13
    skip = ["model.layers.0.*", "model.layers.2.*", "*.self_attn.*", "*.gate_proj"]
    assert_same(scan["layers.1.mlp.down"].quality, with_skip(folder, reference, skip))


def test_the_reference_is_left_as_it_was(quantized: TextModel, folder: Path) -> None:
    reference = load(folder)
    before = measure_quality(reference, IDS, window=80, stride=80)
    scan_sensitivity(quantized, reference, IDS, "kind", window=80)
    measure_layer_errors(quantized, reference, IDS)
    assert measure_quality(reference, IDS, window=80, stride=80) == before
    assert reference.loaded.model.layers[0].attention.qkv.bias is not None  # type: ignore[union-attr]


def test_what_is_refused(folder: Path, quantized: TextModel, reference: TextModel, tmp_path: Path) -> None:
    others = {
        "has no quantized layer to look at; set quantization.method": (reference, reference),
        r"layers\.0\.attention_norm\.weight differs from that of the reference": (
            quantized,
            load(make_tiny_llama(tmp_path / "seed", **SHAPE, seed=1)),
        ),
        "have other shapes": (quantized, load(make_tiny_llama(tmp_path / "layers", **SHAPE, num_hidden_layers=2))),
        "in one dtype on one device": (quantized, load(folder, **{"model.dtype": "bfloat16"})),
    }
    for message, models in others.items():
        with pytest.raises(ConfigError, match=message):
            measure_layer_errors(*models, IDS)
        with pytest.raises(ConfigError, match=message):
            scan_sensitivity(*models, IDS, "kind")
