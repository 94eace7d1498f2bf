"""What saturates in fp8 layers, counted by the definition in float64 beside transformers' model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backend.config import EngineConfig, QuantizationSettings
from backend.experiments.fp8_saturation import Saturation, measure_saturation
from backend.experiments.layer_error import KINDS
from backend.experiments.quality import measure_quality
from backend.experiments.text_pass import TextModel, load_text_model
from backend.models.sources import ModelSource
from backend.quantization.fp8 import FP8, FP8Weight
from tests.helpers import load_oracle, make_tiny_llama

IDS = torch.randint(0, 512, (50,), generator=torch.Generator().manual_seed(2)).tolist()
FP8_SETTINGS = {"quantization.method": "fp8"}
SIZES = {"qkv": (120, 72), "output": (72, 72), "gate_up": (240, 72), "down": (72, 120)}
LEAST = 464  # from here on the nearest code would be above the largest, 448
SMALLEST = 2.0**-149  # step of float32 around 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def load(folder: Path, **overrides: Any) -> TextModel:
    source = ModelSource(str(folder), "folder", path=folder)
    return load_text_model(source, EngineConfig().with_overrides(overrides))


def count(model: TextModel, reference: TextModel) -> dict[tuple[int, str], Saturation]:
    return {(each.layer, each.kind): each for each in measure_saturation(model, reference, IDS, window=30)}


def gate_up(model: TextModel) -> Any:
    return model.loaded.model.layers[1].mlp.gate_up  # type: ignore[union-attr]


def dense_gate_up(folder: Path) -> torch.Tensor:
    mlp: Any = load_oracle(folder).model.layers[1].mlp
    return torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach()


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_scales_of_the_values_themselves_cut_nothing_off(folder: Path, granularity: str) -> None:
    model = load(folder, **FP8_SETTINGS, **{"quantization.granularity": granularity})
    found = count(model, load(folder))
    assert list(found) == [(layer, kind) for layer in range(3) for kind in KINDS]
    for (layer, kind), each in found.items():
        rows, columns = SIZES[kind]
        assert each == Saturation(layer, kind, 0, rows * columns, 0, len(IDS) * columns)


def test_weights_above_their_scales_are_counted(folder: Path) -> None:
    """One layer has half the scales."""
    model = load(folder, **FP8_SETTINGS)
    gate_up(model).packed = replace(gate_up(model).packed, scales=gate_up(model).packed.scales / 2)
    weight = dense_gate_up(folder).double().numpy()
    scales = np.abs(weight).max(axis=1, keepdims=True) / 448 / 2
    expected = int((np.abs(weight) / scales > LEAST).sum())
    assert 240 < expected < 5000
    found = {place: each.saturated_weights for place, each in count(model, load(folder)).items()}
    assert found == {place: expected if place == (1, "gate_up") else 0 for place in found}


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_activations_too_small_for_a_scale_are_counted(folder: Path, granularity: str) -> None:
    """Up to 557 of the smallest steps of float32, 509 in the second window: a scale is one step, where it would need 1.2."""
    models = [load(folder, **FP8_SETTINGS, **{"quantization.granularity": granularity}), load(folder)]
    for model in models:
        norm = model.loaded.model.layers[1].mlp_norm.weight  # type: ignore[union-attr]
        norm.data = torch.linspace(-200, 200, 72) * SMALLEST  # type: ignore[union-attr]
    inputs: list[np.ndarray] = []
    found = count(models[0], models[1])
    gate_up(models[1]).register_forward_pre_hook(lambda _, given: inputs.append(given[0].double().numpy()))
    for start in (0, 30):
        runner = models[1].through_modules()
        runner.run(IDS[start : start + 30], runner.allocate(30))
    expected = 0
    for x in inputs:
        steps = np.abs(x) / SMALLEST
        largest = steps.max(axis=1, keepdims=True) if granularity == "channel" else steps.max()
        scales = np.round(largest / 448)  # halves to even, as float32 rounds
        expected += int((steps > LEAST * scales).sum())
    assert sum(len(x) for x in inputs) == len(IDS)
    assert expected > 0
    assert found[1, "gate_up"].saturated_activations == expected
    assert sum(each.saturated_activations for each in found.values()) == expected


def test_scales_folded_into_a_norm_are_taken_out_first(folder: Path) -> None:
    """As in a checkpoint: the norm divides by as much as the inputs of the layer are multiplied by, and one row is cut off."""
    model = load(folder, **FP8_SETTINGS)
    factors = torch.logspace(-1, 1, 72)
    model.loaded.model.layers[1].mlp_norm.weight.data /= factors  # type: ignore[union-attr,operator]
    folded = dense_gate_up(folder) * factors
    packed = FP8("channel").quantize(folded)
    scales = packed.scales.clone()
    scales[5] /= 3
    gate_up(model).packed = FP8Weight(packed.codes, scales, "channel")
    loaded = replace(
        model.loaded, quantization=QuantizationSettings()
    )  # a checkpoint says how it is stored, no setting
    found = count(replace(model, loaded=loaded), load(folder))
    row = folded[5].double().numpy()
    expected = int((np.abs(row) / (np.abs(row).max() / 448 / 3) > LEAST).sum())
    assert expected > 1
    assert len(found) == 12
    assert {place: each.saturated_weights for place, each in found.items() if each.saturated_weights} == {
        (1, "gate_up"): expected
    }


def test_only_fp8_layers_have_counts(folder: Path) -> None:
    partly = load(folder, **FP8_SETTINGS, **{"quantization.skip": ["model.layers.0.*", "*.down_proj"]})
    reference = load(folder)
    kinds = ("qkv", "output", "gate_up")
    assert list(count(partly, reference)) == [(layer, kind) for layer in (1, 2) for kind in kinds]
    assert count(load(folder, **{"quantization.method": "int8"}), reference) == {}


def test_the_models_are_left_as_they_were(folder: Path) -> None:
    model, reference = load(folder, **FP8_SETTINGS), load(folder)
    before = measure_quality(model, IDS, reference=reference)
    assert count(model, reference) == count(model, reference)
    assert measure_quality(model, IDS, reference=reference) == before
