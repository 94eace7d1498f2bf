"""Embedding and output head: as they are unless asked for otherwise, and an int8 head when asked (known fault QZ-6)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.config import EngineConfig, QuantizationSettings
from backend.engine.loading import load_engine
from backend.errors import CapacityError, ModelError
from backend.layers.linear import Linear
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource, resolve_source
from backend.quantization.int_weight import CpuIntWeight, IntWeight, quantize_by_rounding
from tests.helpers import make_tiny_llama, paged_logits
from tests.quantization.noise import expected_error, int8_steps

CPU = torch.device("cpu")
METHODS = ["int8", "int4", "nf4", "fp8", "w8a8_int8", "llm_int8"]
IDS = torch.randint(0, 512, (200,), generator=torch.Generator().manual_seed(1)).tolist()
# Of 200 positions, those whose likeliest token may change with the head's rounding alone.
TOP1_BOUND = 0.97


def load(folder: Path, dtype: torch.dtype = torch.float32, **settings: object) -> LoadedModel:
    source = ModelSource(str(folder), "folder", path=folder)
    return load_model(source, device=CPU, dtype=dtype, quantization=QuantizationSettings.from_dict(settings))


def make_model(folder: Path, tied: bool) -> Path:
    """Of layers with 64 and 160 inputs."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    return make_tiny_llama(folder, hidden_size=64, intermediate_size=160, tie_word_embeddings=tied, **heads)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_by_default_both_stay_as_they_are_and_tied_ones_one(folder: Path, method: str, dtype: torch.dtype) -> None:
    loaded, plain = load(folder, dtype, method=method), load(folder, dtype)
    embedding, head = loaded.model.embedding, loaded.model.head
    assert torch.equal(embedding, plain.model.embedding)
    assert embedding.dtype == dtype
    assert isinstance(head, Linear)
    identity = torch.eye(64, dtype=dtype)
    assert torch.equal(head(identity), plain.model.head(identity))
    if loaded.config.tie_word_embeddings:
        assert head.weight is not None
        assert head.weight.data_ptr() == embedding.data_ptr()
        assert torch.equal(head(identity), embedding.t())
    assert loaded.notices == ()
    assert loaded.quantization.head is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_an_int8_head_is_a_copy_beside_the_embedding(folder: Path, method: str, dtype: torch.dtype) -> None:
    without, loaded, plain = (
        load(folder, dtype, method=method),
        load(folder, dtype, method=method, head="int8"),
        load(folder, dtype),
    )
    assert torch.equal(loaded.model.embedding, plain.model.embedding)
    assert loaded.model.embedding.dtype == dtype
    head = loaded.model.head
    assert isinstance(head, QuantizedLinear)
    assert isinstance(head.packed, IntWeight | CpuIntWeight)
    pointers = {tensor.untyped_storage().data_ptr() for tensor in head.packed.tensors().values()}
    assert loaded.model.embedding.untyped_storage().data_ptr() not in pointers
    assert (head.packed.bits, head.packed.shape) == (8, (512, 64))
    assert head.packed.words.dtype == torch.int32
    # A byte for each weight and a scale in 32 bits for each of 512 tokens.
    assert head.packed.nbytes == 512 * 64 + 512 * 4
    dense = plain.model.head(torch.eye(64, dtype=dtype)).t().float()
    step = dense.abs().amax(1, keepdim=True) * 2 / 255
    assert ((head.packed.dequantize() - dense).abs() <= step * 0.5001).all()
    assert torch.equal(head.packed.dequantize(), quantize_by_rounding(dense, 8, -1, "none").dequantize())
    tied = loaded.config.tie_word_embeddings
    assert loaded.weights_bytes == without.weights_bytes + head.packed.nbytes - (
        0 if tied else 512 * 64 * dtype.itemsize
    )
    assert loaded.num_quantized_layers == without.num_quantized_layers == 3 * 4
    assert loaded.num_parameters == plain.num_parameters
    if tied:
        (notice,) = loaded.notices
        kept = str(dtype).removeprefix("torch.")
        assert f"an int8 copy of the embedding, which stays in {kept}" in notice
        assert "takes 34,816 bytes" in notice
    else:
        assert loaded.notices == ()


@pytest.mark.parametrize("method", METHODS)
def test_the_likeliest_token_seldom_changes(folder: Path, method: str) -> None:
    """Beside the same layers under the head as it is; logits err as weights' uniform noise lets expect."""
    without, loaded = load(folder, method=method).model, load(folder, method=method, head="int8").model
    hidden: list[torch.Tensor] = []
    loaded.head.register_forward_pre_hook(lambda head, inputs: hidden.append(inputs[0]))
    expected, logits = paged_logits(without, IDS), paged_logits(loaded, IDS)
    assert float((logits.argmax(1) == expected.argmax(1)).float().mean()) >= TOP1_BOUND
    weight = without.head(torch.eye(64)).t()
    error = expected_error(hidden[0], weight, torch.zeros(200, 64), int8_steps(weight, levels=255))
    assert float((logits - expected).norm()) == pytest.approx(error, rel=0.05)


def test_a_head_is_quantized_in_parts_as_in_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(folder, method="int8", head="int8").model.head.packed
    monkeypatch.setattr("backend.models.layer_quantizer._HEAD_WEIGHTS_AT_ONCE", 64 * 100)  # 512 = 5 x 100 + 12
    parts = load(folder, method="int8", head="int8").model.head.packed
    for name, tensor in whole.tensors().items():
        assert torch.equal(parts.tensors()[name], tensor)


@pytest.mark.parametrize(("tied", "name"), [(True, "model.embed_tokens.weight"), (False, "lm_head.weight")])
def test_a_head_that_is_not_finite_is_refused_by_name(tmp_path: Path, tied: bool, name: str) -> None:
    folder = make_model(tmp_path, tied)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load(folder, method="int8")
    with pytest.raises(ModelError, match=f"{name} has 1 values that are infinite or NaN"):
        load(folder, method="int8", head="int8")


def test_a_run_records_what_was_asked_and_that_it_is_emulated() -> None:
    config = EngineConfig().with_overrides(
        {"model.name": "dummy:tiny", "model.device": "cpu", "cache.num_blocks": 8}
        | {"quantization.method": "nf4", "quantization.head": "int8"}
    )
    info = load_engine(config, lambda phase: None).info
    quantization = info.resolved_config.quantization
    assert (quantization.method, quantization.head, quantization.group_size) == ("nf4", "int8", 32)
    assert info.load["emulated_quantization"] is True
    assert info.load["num_quantized_layers"] == 3 * 4
    assert info.load["unquantized_layers"] == []
    plain = load_engine(config.with_overrides({"quantization": {}}), lambda phase: None).info
    assert plain.load["emulated_quantization"] is False


def test_memory_is_asked_for_the_heads_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.1-8B's: 128,256 x 4,096 bytes, 0.49 GiB, beside the 7.6 GiB of int4 layers and the rest in float32."""
    monkeypatch.setattr("backend.models.loader._free_bytes", lambda device: 2**30)
    settings = QuantizationSettings(method="int4", head="int8")
    with pytest.raises(CapacityError, match=r"8\.1 GiB in int4 and float32"):
        load_model(resolve_source("dummy:llama-3.1-8b"), device=CPU, dtype=torch.float32, quantization=settings)
