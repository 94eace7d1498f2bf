"""Weights at the edge, for every method: known faults QZ-1 (sizes that do not divide) and QZ-2 (nothing to scale by)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.config import QuantizationSettings
from backend.errors import ModelError
from backend.layers.linear import Linear
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource
from backend.quantization.base import PackedWeight, QuantMethod
from backend.quantization.group_size import CHANNEL
from backend.quantization.llm_int8 import LLMInt8Weight
from backend.quantization.methods import make_method, resolve_settings
from backend.quantization.w8a8_int8 import W8A8Weight
from kernels.reference.nf4_linear import NF4_LEVELS
from tests.helpers import make_tiny_llama

CPU = torch.device("cpu")
INT4 = [
    {"method": "int4", "group_size": group_size, "zero_point": zero_point}
    for group_size in (32, CHANNEL)
    for zero_point in ("none", "integer", "float")
]
NF4 = [{"method": "nf4", "group_size": group_size} for group_size in (32, CHANNEL)]
FP8 = [{"method": "fp8", "granularity": granularity} for granularity in ("channel", "tensor")]
SETTINGS = [{"method": "int8"}, *INT4, *NF4, *FP8, {"method": "w8a8_int8"}, {"method": "llm_int8"}]
all_methods = pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))


def make(settings: dict[str, object], in_features: int) -> QuantMethod:
    resolved = resolve_settings(QuantizationSettings.from_dict(settings), {"layer": in_features})
    method = make_method(resolved)
    assert method is not None
    return method


def random_weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.05 + 0.01


def one_step(settings: dict[str, object], weight: torch.Tensor) -> torch.Tensor:
    """Of each weight, the largest distance of two values side by side that its scale allows; half of it is rounding's error,
    and the other half is left to scales, minimums and zero points that are rounded themselves."""
    size = settings.get("group_size", CHANNEL)
    groups = weight.double().unflatten(1, (-1, weight.shape[1] if size == CHANNEL else size))
    span, low, high = groups.abs().amax(2), groups.amin(2), groups.amax(2)
    match settings["method"]:
        case "int4":
            if settings["zero_point"] == "none":
                low, high = -span, span
            elif settings["zero_point"] == "integer":
                low, high = low.clamp(max=0), high.clamp(min=0)
            # What float16 makes of a step and of a minimum, down to its smallest number.
            steps = (high - low) / 15 + span * 2**-9 + 2**-20
        case "nf4":
            widest = max(high - low for low, high in pairwise(NF4_LEVELS))
            steps = span * widest + span.amax(1, keepdim=True) / 127  # of levels, and of the magnitude they multiply
        case "fp8":
            steps = (span if settings["granularity"] == "channel" else span.amax().expand_as(span)) * 2**-3
        case _:
            steps = span / 127
    return steps[:, :, None].expand_as(groups).flatten(1)


@all_methods
@pytest.mark.parametrize("shape", [(1376, 96), (96, 1376)], ids=["1376x96", "96x1376"])
def test_a_layer_of_1376_by_96(settings: dict[str, object], shape: tuple[int, int]) -> None:
    """43 groups of 32, or 3: no input is left without its scale."""
    weight = random_weight(*shape)
    weight[:, -32:] *= 3  # a last group that would not pass with another's scale
    packed = make(settings, shape[1]).quantize(weight)
    assert packed.shape == shape
    dequantized = packed.dequantize()
    assert dequantized.shape == shape
    assert dequantized.dtype == torch.float32
    error = (dequantized - weight).abs()
    assert (error <= one_step(settings, weight)).all()
    assert (error > 0).float().mean() > 0.5
    assert_product_is_the_dequantized_weights(packed)


def assert_product_is_the_dequantized_weights(packed: PackedWeight) -> None:
    """On inputs whose place on the grids of activations is known: one at a time, and all."""
    in_features = packed.shape[1]
    x = torch.zeros(in_features + 1, in_features)
    x[:in_features] = torch.eye(in_features)
    x[-1] = 1.0
    # A one is a code but in int8, where 127.5 steps reach it and the largest code is 127; scales are rounded to float32.
    rounded = x.double() * (127 / 127.5 if isinstance(packed, W8A8Weight | LLMInt8Weight) else 1.0)
    expected = rounded @ packed.dequantize().double().t()
    torch.testing.assert_close(packed.linear(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 0


@all_methods
@pytest.mark.parametrize("value", [0.0, 1e-30, -1e-30, 1e-8, 0.125, -3.0, 30000.0])
def test_groups_and_rows_of_one_value(settings: dict[str, object], value: float) -> None:
    """Zeros are exact zeros, a constant is itself within a step, nothing is NaN; 1e-30 is not divided by."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weight = random_weight(6, 128)
        weight[1, 32:64] = value
        weight[2] = value
        weight = weight.to(dtype)
        packed = make(settings, 128).quantize(weight)
        dequantized = packed.dequantize()
        assert dequantized.isfinite().all()
        assert packed.linear(torch.ones(3, 128)).isfinite().all()
        error = (dequantized - weight.float()).abs()
        assert (error <= one_step(settings, weight)).all()
        zeros = weight == 0
        if settings == {"method": "int4", "group_size": CHANNEL, "zero_point": "float"}:
            zeros[:2] = False  # above the minimum of a row that is not all zeros there need be no code for 0
        assert not dequantized[zeros].any()
        if settings.get("granularity") != "tensor":  # what lies beside it, a row does not feel
            others = [0, 3, 4, 5]
            plain = make(settings, 128).quantize(random_weight(6, 128).to(dtype)).dequantize()
            assert torch.equal(dequantized[others], plain[others])


@all_methods
def test_nothing_but_zeros(settings: dict[str, object]) -> None:
    packed = make(settings, 64).quantize(torch.zeros(4, 64))
    assert torch.equal(packed.dequantize(), torch.zeros(4, 64))
    assert torch.equal(packed.linear(torch.randn(3, 64)), torch.zeros(3, 4))


@all_methods
def test_bytes_reported_are_bytes_held(settings: dict[str, object]) -> None:
    packed = make(settings, 96).quantize(random_weight(1376, 96))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in packed.tensors().values()
    }
    assert packed.nbytes == sum(storages.values())
    assert packed.bits_per_weight == packed.nbytes * 8 / (1376 * 96)
    # A row of 96 in four bits has at most three groups of a step and a minimum in 16 bits; in eight, a scale in 32.
    limit = 4 + 32 / 32 if settings["method"] in ("int4", "nf4") else 8 + 32 / 96
    assert packed.bits_per_weight <= limit


@all_methods
def test_rows_are_cut_and_joined(settings: dict[str, object]) -> None:
    weight = random_weight(30, 96)
    packed = make(settings, 96).quantize(weight)
    parts = [make(settings, 96).quantize(part) for part in weight.split([18, 6, 6])]
    joined = type(packed).join(parts)
    assert joined.shape == (30, 96)
    for name, tensor in joined.tensors().items():
        assert torch.equal(tensor, torch.cat([part.tensors()[name] for part in parts]))
    if settings.get("granularity") != "tensor":  # of which each part has a scale of its own
        assert torch.equal(joined.dequantize(), packed.dequantize())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of layers with 64 and 160 inputs."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_llama(folder, hidden_size=64, intermediate_size=160, num_hidden_layers=2, **heads)


def load(folder: Path, settings: dict[str, object], dtype: torch.dtype = torch.float32) -> LoadedModel:
    source = ModelSource(str(folder), "folder", path=folder)
    return load_model(source, device=CPU, dtype=dtype, quantization=QuantizationSettings.from_dict(settings))


@all_methods
def test_a_model_reports_what_it_holds(folder: Path, settings: dict[str, object]) -> None:
    loaded, plain = load(folder, settings, torch.bfloat16), load(folder, {}, torch.bfloat16)
    assert loaded.num_quantized_layers == 2 * 4
    assert loaded.unquantized_layers == ()
    linears = [module for module in plain.model.layers.modules() if isinstance(module, Linear)]
    dense = sum(2 * module.in_features * module.out_features for module in linears)
    packed = [module.packed for module in loaded.model.modules() if isinstance(module, QuantizedLinear)]
    assert loaded.weights_bytes == plain.weights_bytes - dense + sum(weight.nbytes for weight in packed)
    assert loaded.emulated_quantization == any(weight.emulated for weight in packed)
    assert not plain.emulated_quantization


@all_methods
def test_infinite_weights_are_refused_by_name(folder: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][3, 5] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight has 1 values that are infinite"):
        load(tmp_path, settings)
