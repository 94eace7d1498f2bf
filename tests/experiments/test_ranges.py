"""Ranges against what passes through transformers' model, by numpy's percentile and scipy's kurtosis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from backend.config import EngineConfig
from backend.experiments.layer_error import KINDS
from backend.experiments.quality import measure_quality
from backend.experiments.ranges import (
    EXPECTED_ORDER,
    GroupRange,
    Range,
    measure_ranges,
    order,
    summarize_ranges,
)
from backend.experiments.text_pass import TextModel, load_text_model
from backend.models.sources import ModelSource
from tests.experiments.planted import plant_outliers
from tests.helpers import load_oracle, make_tiny_model

IDS = torch.randint(0, 512, (90,), generator=torch.Generator().manual_seed(2)).tolist()
WINDOW = 20  # of attention
WEIGHTS = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "output": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}
# Of what transformers' model computes with, behind its axis of one text.
AXES = {
    "weights": {"output": 0, "input": 1},
    "activations": {"input": -1},
    "KV": {"head": 1, "channel": -1},
    "attention logits": {"head": 1},
}


def load(folder: Path, **overrides: Any) -> TextModel:
    source = ModelSource(str(folder), "folder", path=folder)
    return load_text_model(source, EngineConfig().with_overrides(overrides))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "Mistral", sliding_window=WINDOW)


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[tuple[str, int, str], np.ndarray]:
    """All values that transformers' model computes with, in float64, by group, layer and part."""
    from transformers import AttentionInterface

    values: dict[tuple[str, int, str], np.ndarray] = {}
    layers: Iterator[int] = iter(range(3))

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        layer = next(layers)
        values["KV", layer, "keys"], values["KV", layer, "values"] = key.numpy(), value.numpy()
        groups = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(groups, 1).mT * scaling
        allowed = torch.ones(len(IDS), len(IDS), dtype=torch.bool).tril().triu(1 - WINDOW)
        values["attention logits", layer, "scores"] = scores[:, :, allowed].numpy()
        attended = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1)
        return attended.transpose(1, 2).contiguous(), None

    AttentionInterface.register("seen", attend)
    oracle: Any = load_oracle(folder).double()
    oracle.set_attn_implementation("seen")
    for layer, block in enumerate(oracle.model.layers):
        for kind, names in WEIGHTS.items():
            linears = [block.get_submodule(name) for name in names]
            values["weights", layer, kind] = np.concatenate([linear.weight.detach().numpy() for linear in linears])

            def look(_: nn.Module, inputs: tuple[Tensor], layer: int = layer, kind: str = kind) -> None:
                values["activations", layer, kind] = inputs[0].numpy()

            linears[0].register_forward_pre_hook(look)
    with torch.inference_mode():
        oracle(torch.tensor([IDS]), use_cache=False)
    return values


def assert_range(measured: Range, values: np.ndarray) -> None:
    sizes = np.abs(values).ravel()
    assert measured.max_abs == pytest.approx(sizes.max(), rel=1e-5)
    assert measured.p999 == pytest.approx(np.percentile(sizes, 99.9), rel=1e-5)
    assert measured.kurtosis == pytest.approx(scipy.stats.kurtosis(values.ravel(), fisher=False), rel=1e-5)
    axes = AXES[measured.group]
    assert list(measured.outlier) == list(axes)
    named: list[Any] = [slice(None)] * values.ndim
    for name, axis in axes.items():
        named[axis] = measured.outlier[name]
    assert np.abs(values[tuple(named)]).max() == pytest.approx(sizes.max(), rel=1e-5)


def test_ranges_are_those_of_what_transformers_computes_with(
    folder: Path, seen: dict[tuple[str, int, str], np.ndarray]
) -> None:
    ranges = measure_ranges(load(folder), IDS)
    assert len(ranges) == len(seen) == 3 * (4 + 4 + 2 + 1)
    for each in ranges:
        assert_range(each, seen[each.group, each.layer, each.part])


def test_of_a_quantized_model_the_weights_are_what_it_multiplies_by(
    folder: Path, seen: dict[tuple[str, int, str], np.ndarray]
) -> None:
    """Two bits, a step for each output: the largest of a row becomes the end of its grid, 1.5 steps from the middle."""
    model = load(folder, **{"quantization.method": "int4", "quantization.bits": 2, "quantization.group_size": -1})
    found = [each for each in measure_ranges(model, IDS) if each.group == "weights"]
    assert [(each.layer, each.part) for each in found] == [(layer, kind) for layer in range(3) for kind in KINDS]
    for each in found:
        weight = seen["weights", each.layer, each.part]
        low, high = weight.min(axis=1, keepdims=True), weight.max(axis=1, keepdims=True)
        step = (high - low) / 3
        assert_range(each, np.round((weight - low) / step) * step + low)


def test_planted_outliers_are_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "Mistral", sliding_window=WINDOW)
    planted = plant_outliers(folder)
    groups = summarize_ranges(measure_ranges(load(folder), IDS))
    assert {each.group: (each.layer, each.part, each.outlier) for each in groups} == planted


def test_a_model_is_left_as_it_was(folder: Path) -> None:
    model = load(folder)
    before = measure_quality(model, IDS)
    assert measure_ranges(model, IDS) == measure_ranges(model, IDS)
    assert measure_quality(model, IDS) == before


def test_a_group_is_its_largest_value_and_the_medians() -> None:
    ranges = [
        Range(
            group,
            layer,
            "part",
            max_abs=scale * (layer + 1),
            p999=scale * p999,
            kurtosis=kurtosis,
            outlier={"input": layer},
        )
        for scale, group in enumerate(reversed(EXPECTED_ORDER), start=1)
        for layer, (p999, kurtosis) in enumerate([(0.5, 3.0), (0.9, None), (0.1, 5.0)])
    ]
    groups = summarize_ranges(ranges)
    assert groups[0] == GroupRange(
        "weights", max_abs=12, layer=2, part="part", p999=2.0, kurtosis=4.0, outlier={"input": 2}
    )
    assert [each.group for each in groups] == list(EXPECTED_ORDER)
    assert order(groups) == list(reversed(EXPECTED_ORDER))
