"""Checkpoints by AutoAWQ and AutoGPTQ, against what those tools say of them (see fixtures/README.md), and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.config import QuantizationSettings
from backend.errors import ConfigError, ModelError
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import model_info, resolve_source
from backend.quantization.base import PackedWeight
from backend.quantization.formats import gptq_v1
from backend.quantization.formats.scheme import StoredScheme
from backend.quantization.int_weight import quantize_by_rounding
from backend.quantization.permuted_weight import PermutedWeight
from kernels.cpu.support import has_cpu_kernels
from tests.helpers import dense_logits, paged_logits

FIXTURES = Path(__file__).parent / "fixtures"
AWQ, GPTQ = "awq_tiny", "gptq_tiny"
BITS = {AWQ: 4, GPTQ: 4, "gptq_3bit_tiny": 3, "gptq_8bit_tiny": 8}
MODULES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def load(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> LoadedModel:
    quantization = QuantizationSettings.from_dict(settings)
    return load_model(resolve_source(str(folder)), device=torch.device("cpu"), dtype=dtype, quantization=quantization)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def packed(loaded: LoadedModel, module: str) -> PackedWeight:
    layer = loaded.model.get_submodule(f"layers.0.{module}")
    assert isinstance(layer, QuantizedLinear)
    return layer.packed


def weights(loaded: LoadedModel) -> dict[str, Tensor]:
    """Of each projection, float32, by its name in a checkpoint."""
    found = {}
    for module, names in MODULES.items():
        weight = packed(loaded, module).dequantize()
        sizes = {"attention.qkv": [64, 32, 32], "mlp.gate_up": [96, 96]}.get(module, [len(weight)])
        found |= {f"model.layers.0.{name}.weight": part for name, part in zip(names, weight.split(sizes), strict=True)}
    return found


def expected(name: str) -> tuple[dict[str, Tensor], list[int], Tensor]:
    """The tool's own float16 weights of some projections, token ids, and their logits."""
    tensors = load_file(FIXTURES / f"{name}_expected.safetensors")
    return tensors, tensors.pop("token_ids").tolist(), tensors.pop("logits")


def changed(
    tmp_path: Path,
    name: str,
    config: dict[str, Any] | None = None,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor | None]] = lambda tensors: {},
    **quantization: Any,
) -> Path:
    """A copy of a fixture with fields of its config and of the quantization in that, and tensors put in or (None) left out."""
    folder = Path(shutil.copytree(FIXTURES / name, tmp_path / "changed"))
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | (config or {})
    fields["quantization_config"] |= quantization
    path.write_text(json.dumps(fields))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in (tensors | change(tensors)).items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})
    return folder


def make_dense(folder: Path, quantized: Path, loaded: LoadedModel) -> Path:
    """The model with its projections as `loaded` says they are."""
    folder.mkdir()
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (file,) = quantized.glob("*.safetensors")
    others = {name: tensor for name, tensor in load_file(file).items() if "_proj" not in name or name.endswith("bias")}
    save_file({name: tensor.float() for name, tensor in others.items()} | weights(loaded), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", BITS)
def test_a_checkpoint_is_what_its_tool_says_it_is(name: str) -> None:
    of_tool, ids, logits = expected(name)
    loaded = load(FIXTURES / name)
    found = weights(loaded)
    assert len(of_tool) == 3
    for projection, weight in of_tool.items():
        assert torch.equal(found[projection].half(), weight)
    torch.testing.assert_close(paged_logits(loaded.model, ids), logits, atol=1e-5, rtol=0)
    assert loaded.num_quantized_layers == 4
    assert loaded.notices == ()


@pytest.mark.parametrize("name", BITS)
def test_its_weights_stay_packed_and_take_the_fast_path(name: str) -> None:
    loaded = load(FIXTURES / name)
    for module in MODULES:
        weight = packed(loaded, module)
        assert isinstance(weight, PermutedWeight) == (name == GPTQ)
        inner = weight.weight if isinstance(weight, PermutedWeight) else weight
        out_features, in_features = weight.shape
        codes = out_features * -(-in_features // (32 // BITS[name])) * 4
        assert inner.nbytes == codes + out_features * in_features // 32 * 3  # a scale and a zero point for 32 weights
        assert weight.emulated == (BITS[name] == 3 or not has_cpu_kernels())
    assert loaded.emulated_quantization == (BITS[name] == 3 or not has_cpu_kernels())


@pytest.mark.parametrize("name", [AWQ, GPTQ])
def test_in_16_bits_it_computes_nearly_the_same(name: str) -> None:
    _, ids, logits = expected(name)
    found = paged_logits(load(FIXTURES / name, torch.bfloat16).model, ids)
    torch.testing.assert_close(found, logits, atol=0.1, rtol=0)


def test_biases_are_read_beside_packed_weights(tmp_path: Path) -> None:
    def add_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        names = [name for name in tensors if "self_attn" in name and name.endswith("bias")]
        assert len(names) == 4
        return {name: torch.randn(tensors[name].shape, generator=generator).half() for name in names}

    folder = changed(tmp_path, GPTQ, {"attention_bias": True}, add_biases)
    loaded, (_, ids, without) = load(folder), expected(GPTQ)
    found = paged_logits(loaded.model, ids)
    dense = make_dense(tmp_path / "dense", folder, loaded)
    torch.testing.assert_close(found, dense_logits(dense, ids), atol=1e-5, rtol=0)
    assert (found - without).abs().max() > 0.1


def test_a_bias_that_the_model_has_no_place_for_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.bias"
    folder = changed(tmp_path, GPTQ, None, lambda tensors: {name: torch.eye(96)[5].half()})
    assert f"{name} is not 0" in refusal(folder)


def test_modules_that_were_not_converted_are_loaded_as_they_are(tmp_path: Path) -> None:
    down = "model.layers.0.mlp.down_proj"

    def unpack(tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
        weight = weights(load(FIXTURES / AWQ))[f"{down}.weight"]
        return {f"{down}.{suffix}": None for suffix in ("qweight", "qzeros", "scales")} | {f"{down}.weight": weight}

    loaded = load(changed(tmp_path, AWQ, None, unpack, modules_to_not_convert=["down_proj"]))
    _, ids, logits = expected(AWQ)
    assert loaded.unquantized_layers == ("layers.0.mlp.down",)
    torch.testing.assert_close(paged_logits(loaded.model, ids), logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_zero_point_survives_being_stored_less_one(bits: int) -> None:
    """As GPTQModel writes them: one is taken from whole words, so that a 0 borrows from the next; of 3 bits from each field."""
    zeros = torch.arange(64) % 2**bits
    if bits == 3:
        number = sum(((zero - 1) % 8) << (3 * place) for place, zero in enumerate(zeros.tolist()))
        words = [(number >> (32 * word)) % 2**32 for word in range(6)]
    else:
        per_word, ones = 32 // bits, sum(1 << place for place in range(0, 32, bits))
        words = [
            (sum(zero << (bits * place) for place, zero in enumerate(part.tolist())) - ones) % 2**32
            for part in zeros.split(per_word)
        ]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    tensors = {
        "p.qweight": torch.zeros(32 * bits // 32, 64, dtype=torch.int32),
        "p.qzeros": torch.tensor([signed], dtype=torch.int32),
        "p.scales": torch.ones(1, 64, dtype=torch.float16),
        "p.g_idx": torch.zeros(32, dtype=torch.int32),
    }
    scheme = StoredScheme("gptq-v1", bits, "channel", symmetric=False)
    weight = gptq_v1.decode("p", lambda name, *_: tensors[name], scheme, (64, 32))
    assert torch.equal(weight.dequantize(), -zeros.float()[:, None].expand(64, 32))


def test_groups_in_different_orders_or_sizes_are_refused(tmp_path: Path) -> None:
    query, down = "model.layers.0.self_attn.q_proj.g_idx", "model.layers.0.mlp.down_proj.g_idx"
    folder = changed(tmp_path / "order", GPTQ, None, lambda tensors: {query: tensors[query].flip(0).contiguous()})
    assert "(g_idx, desc_act) of model.layers.0.self_attn.q_proj" in refusal(folder)
    folder = changed(tmp_path / "plain", GPTQ, None, lambda tensors: {query: tensors[query].sort().values})
    assert "(g_idx, desc_act) of model.layers.0.self_attn.q_proj" in refusal(folder)
    folder = changed(tmp_path / "size", GPTQ, None, lambda tensors: {down: tensors[down].clamp(max=1)})
    assert f"{down} (desc_act) does not give 32 inputs to each of 3 groups" in refusal(folder)


def test_tensors_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    up = "model.layers.0.mlp.up_proj"
    folder = changed(tmp_path / "missing", GPTQ, None, lambda tensors: {f"{up}.g_idx": None})
    assert f"lacks {up}.g_idx" in refusal(folder)
    folder = changed(tmp_path / "shape", AWQ, None, lambda tensors: {f"{up}.qzeros": tensors[f"{up}.qzeros"][:1]})
    assert f"{up}.qzeros has shape [1, 12] instead of [2, 12]" in refusal(folder)
    bad = {f"{up}.scales": torch.full((2, 96), torch.inf).half()}
    folder = changed(tmp_path / "scales", AWQ, None, lambda tensors: dict(bad))
    assert f"{up}.scales has values that are infinite" in refusal(folder)
    assert "groups of 48 do not divide 64 inputs" in refusal(changed(tmp_path / "group", AWQ, group_size=48))


@pytest.mark.parametrize(
    ("name", "quantization", "named"),
    [
        (AWQ, {"version": "gemv"}, "version of awq 'gemv' is not supported; supported: gemm"),
        (AWQ, {"checkpoint_format": "marlin"}, "checkpoint_format of awq 'marlin'"),
        (AWQ, {"bits": 8}, "bits 8 of awq is not supported; supported: 4"),
        (AWQ, {"zero_point": False}, "zero_point false"),
        (AWQ, {"modules_to_not_convert": "mlp"}, "modules_to_not_convert is not a list"),
        (
            GPTQ,
            {"checkpoint_format": "gptq_v2"},
            "checkpoint_format of gptq 'gptq_v2' is not supported; supported: gptq",
        ),
        (GPTQ, {"format": "marlin"}, "checkpoint_format of gptq 'marlin'"),
        (GPTQ, {"is_marlin_format": True}, "is_marlin_format is set"),
        (GPTQ, {"pack_dtype": "int16"}, "pack_dtype of gptq 'int16'"),
        (GPTQ, {"bits": 5}, "bits 5 of gptq is not supported; supported: 2, 3, 4, 8"),
        (GPTQ, {"group_size": 0}, "group_size 0"),
        (GPTQ, {"lm_head": True}, "a quantized output head (lm_head)"),
        (GPTQ, {"dynamic": {"-:.*down.*": {}}}, "dynamic is set"),
        (GPTQ, {"modules_in_block_to_quantize": [["mlp.up_proj"]]}, "modules_in_block_to_quantize is set"),
        (
            GPTQ,
            {"quant_method": "aqlm"},
            "quant_method 'aqlm' is not supported; supported: compressed-tensors, awq, gptq",
        ),
    ],
)
def test_what_is_stored_otherwise_is_refused(
    tmp_path: Path, name: str, quantization: dict[str, Any], named: str
) -> None:
    message = refusal(changed(tmp_path, name, None, **quantization))
    assert "config.json" in message
    assert named in message


def test_it_is_a_model_like_any_other(tmp_path: Path) -> None:
    info = model_info(str(FIXTURES / GPTQ))
    assert info["num_parameters"] == 64 * 64 + 3 * 64 + (64 + 2 * 32 + 64) * 64 + 3 * 64 * 96
    with pytest.raises(ConfigError, match=r"quantized already \(awq-gemm, int4, groups of 32, zero points\)"):
        load(FIXTURES / AWQ, method="int8")


def test_autogptqs_names_of_parts(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / GPTQ, tmp_path / "parts"))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    names = sorted(tensors)
    weight_map = {
        name: f"gptq_model-4bit-32g-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)
    }
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == part}, folder / part)
    file.unlink()
    with pytest.raises(ModelError, match="has no weights"):
        load(folder)
    (folder / f"{file.name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _, ids, logits = expected(GPTQ)
    torch.testing.assert_close(paged_logits(load(folder).model, ids), logits, atol=1e-5, rtol=0)


def test_a_permuted_weight_multiplies_each_input_by_its_own_column() -> None:
    generator = torch.Generator().manual_seed(0)
    stored = quantize_by_rounding(torch.randn(6, 64, generator=generator), 4, 32, "integer")
    order = torch.randperm(64, generator=generator)
    weight = PermutedWeight(stored, order)
    x, bias = torch.randn(3, 64, generator=generator), torch.randn(6, generator=generator)
    naive = bias.double().repeat(3, 1)
    for column, source in enumerate(order.tolist()):
        naive += x[:, source, None].double() * stored.dequantize()[:, column].double()
        assert torch.equal(weight.dequantize()[:, source], stored.dequantize()[:, column])
    torch.testing.assert_close(weight.linear(x, bias).double(), naive, atol=1e-5, rtol=0)
    assert weight.nbytes == stored.nbytes + 64 * 8
    joined = PermutedWeight.join([weight, weight.to("cpu")])
    assert torch.equal(joined.dequantize(), weight.dequantize().repeat(2, 1))
    with pytest.raises(ValueError, match="different orders"):
        PermutedWeight.join([weight, PermutedWeight(stored, order.flip(0))])
