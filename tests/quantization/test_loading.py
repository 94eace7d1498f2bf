"""A model that is quantized as it is loaded: what it computes, what it takes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.config import QuantizationSettings
from backend.errors import CapacityError, ConfigError, ModelError
from backend.layers.linear import Linear
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.dummy import DUMMY_SHAPES
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource, resolve_source
from backend.quantization.group_size import allowed_group_sizes
from backend.quantization.int_weight import quantize_by_rounding
from tests.helpers import dense_logits, load_oracle, make_tiny_llama, paged_logits

CPU = torch.device("cpu")
IDS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()
INT4 = {"method": "int4", "group_size": 32, "zero_point": "integer"}


def load(folder: Path, dtype: torch.dtype = torch.float32, **settings: object) -> LoadedModel:
    source = ModelSource(str(folder), "folder", path=folder)
    return load_model(source, device=CPU, dtype=dtype, quantization=QuantizationSettings.from_dict(settings))


def make_model(folder: Path, **changes: object) -> Path:
    """Of layers with 64 and 160 inputs."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    return make_tiny_llama(folder, hidden_size=64, intermediate_size=160, **heads, **changes)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=request.param)


@pytest.mark.parametrize(
    ("settings", "bits", "group_size", "zero_point"),
    [({"method": "int8"}, 8, -1, "none"), (INT4, 4, 32, "integer"), ({"method": "int4", "bits": 3}, 3, 32, "float")],
)
def test_logits_are_those_of_the_model_with_each_projection_rounded(
    folder: Path, settings: dict[str, object], bits: int, group_size: int, zero_point: str
) -> None:
    """transformers' model, its projections replaced one by one; embedding, norms and head are not touched."""
    oracle = load_oracle(folder)
    for layer in oracle.model.layers:
        for linear in (module for module in layer.modules() if isinstance(module, torch.nn.Linear)):
            linear.weight.data = quantize_by_rounding(linear.weight.data, bits, group_size, zero_point).dequantize()
    loaded = load(folder, **settings)
    torch.testing.assert_close(paged_logits(loaded.model, IDS), dense_logits(oracle, IDS), atol=1e-4, rtol=0)
    assert not torch.allclose(paged_logits(load(folder).model, IDS), dense_logits(oracle, IDS), atol=1e-4, rtol=0)


def test_embedding_and_head_stay_as_they_are(folder: Path) -> None:
    loaded = load(folder, **INT4)
    plain = load(folder)
    assert torch.equal(loaded.model.embedding, plain.model.embedding)
    assert isinstance(loaded.model.head, Linear)
    shared = loaded.model.head._parameters.get("weight")
    assert (shared is loaded.model.embedding) == loaded.config.tie_word_embeddings


def test_bytes_reported_are_the_bytes_held(folder: Path) -> None:
    loaded = load(folder, **INT4)
    plain = load(folder)
    linears = [module for module in plain.model.layers.modules() if isinstance(module, Linear)]
    sizes = [module.in_features * module.out_features for module in linears]
    assert loaded.num_quantized_layers == len(linears) == 3 * 4
    # 4 bits, a step in 16 and a zero point in 8 for 32 weights.
    packed = sum(sizes) * (4 + 24 / 32) / 8
    assert loaded.weights_bytes == plain.weights_bytes - 4 * sum(sizes) + packed
    held = [module.packed for module in loaded.model.modules() if isinstance(module, QuantizedLinear)]
    assert sum(weight.nbytes for weight in held) == packed
    assert loaded.num_parameters == plain.num_parameters


def test_a_pattern_leaves_layers_out_whole(folder: Path) -> None:
    loaded = load(folder, **INT4, skip=["model.layers.0.*", "*.k_proj"])
    assert loaded.unquantized_layers == (
        *(f"layers.0.{name}" for name in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")),
        "layers.1.attention.qkv",
        "layers.2.attention.qkv",
    )
    for path, module in loaded.model.layers.named_modules():
        if isinstance(module, Linear | QuantizedLinear):
            assert isinstance(module, QuantizedLinear) == (f"layers.{path}" not in loaded.unquantized_layers)
    named = "model.layers.1.self_attn.q_proj, model.layers.1.self_attn.v_proj: not quantized either"
    assert any(notice.startswith(named) for notice in loaded.notices)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"group_size": 48}, ["group_size = 48", "64 inputs of model.layers.0.self_attn.q_proj", "32", "-1"]),
        ({"group_size": 64}, ["group_size = 64", "160 inputs of model.layers.0.mlp.down_proj", "allowed", "32, -1"]),
        ({"group_size": 16}, ["group_size = 16", "multiple of 32"]),
        ({"skip": ["*.experts"]}, ["'*.experts'", "model.layers.0.self_attn.q_proj"]),
        ({"skip": ["*"]}, ["no layer to quantize"]),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(
    folder: Path, settings: dict[str, object], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, method="int4", **settings)
    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize("method", ["int4", "nf4"])
def test_the_default_models_groups(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M's 576 and 1,536 inputs (known fault QZ-1): 128 is refused before there is a weight, and the rest is not."""
    source = resolve_source("dummy:smollm2-135m")
    assert source.shape is not None
    config = DUMMY_SHAPES[source.shape]
    assert (config.hidden_size, config.intermediate_size) == (576, 1536)
    fitting = [size for size in range(32, 577, 32) if 576 % size == 1536 % size == 0]
    assert allowed_group_sizes([576, 1536]) == fitting == [32, 64, 96, 192]

    def build(*arguments: object) -> None:
        raise AssertionError("it makes room for weights")

    def load_shape(group_size: int | None) -> LoadedModel:
        settings = QuantizationSettings.from_dict({"method": method, "group_size": group_size})
        return load_model(source, device=CPU, dtype=torch.float32, quantization=settings)

    monkeypatch.setattr("backend.models.loader._build", build)
    for group_size, problem in (
        (128, "does not divide the 576 inputs of model.layers.0.self_attn.q_proj"),
        (288, "does not divide the 1,536 inputs of model.layers.0.mlp.down_proj"),
        (48, "is not a multiple of 32"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_shape(group_size)
        assert str(caught.value) == (
            f"quantization.group_size = {group_size} {problem}; allowed for this model: 32, 64, 96, 192, -1 (per channel)"
        )
    for group_size in (None, *fitting, -1):
        with pytest.raises(AssertionError, match="makes room for weights"):
            load_shape(group_size)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float) -> None:
    folder = make_model(tmp_path)
    path, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name][3, 5] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has 1 values that are infinite or NaN"
    ):
        load(folder, **INT4)


def test_a_dummy_model_is_the_same_one_quantized() -> None:
    source = resolve_source("dummy:tiny")
    plain = load_model(source, device=CPU, dtype=torch.float32)
    settings = QuantizationSettings(method="int8")
    quantized = load_model(source, device=CPU, dtype=torch.float32, quantization=settings)
    for path, module in quantized.model.named_modules():
        if isinstance(module, QuantizedLinear):
            identity = torch.eye(module.in_features)
            expected = plain.model.get_submodule(path)(identity)
            torch.testing.assert_close(module(identity), expected, rtol=0, atol=float(expected.abs().max()) / 200)


def test_memory_is_asked_for_what_the_packed_weights_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.1-8B: embedding and head 3.9 GiB, layers in four bits 3.25 GiB, and one of them in float32 0.44 GiB."""
    monkeypatch.setattr("backend.models.loader._free_bytes", lambda device: 2**30)
    source = resolve_source("dummy:llama-3.1-8b")
    for settings, expected in (({}, "29.9 GiB in float32"), ({"method": "int4"}, "7.6 GiB in int4 and float32")):
        with pytest.raises(CapacityError, match=expected):
            load_model(source, device=CPU, dtype=torch.float32, quantization=QuantizationSettings.from_dict(settings))
