"""Quantized checkpoints and the library whose format they have: it reads ours as we do, and we read its."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.quantization.formats.compressed_tensors import encode
from backend.quantization.formats.dense_words import pack_dense
from backend.quantization.int_weight import IntWeight
from backend.quantization.quantize_model import SavedMethod
from kernels.reference.int8_linear import quantize_tokens_int8
from tests.helpers import dense_logits, paged_logits
from tests.quantization.saved_models import (
    CALIBRATED,
    IDS,
    KINDS,
    SCHEMES,
    load,
    make_model,
    packed_layers,
    quantized,
    random_codes,
    save,
)

# Our linear layers, and the projections in transformers' decoder that lie side by side in them.
PROJECTIONS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("bits", range(2, 9))
def test_words_are_the_librarys(bits: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = random_codes(5, 75, bits)
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(pack_dense(codes, bits), helpers.pack_to_int32(signed, bits))
    packed = pack_dense(codes.t(), bits).t()
    assert torch.equal(packed, helpers.pack_to_int32(signed, bits, packed_dim=0))


@pytest.mark.parametrize(("method", "options"), SCHEMES)
def test_a_weight_is_stored_as_the_library_stores_it(method: str, options: dict[str, Any]) -> None:
    """Names, shapes, dtypes and every bit of what its compressor makes of the same values, scales and zero points."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    packed, scheme = quantized(method, options)
    tensors = encode(packed, scheme)
    state = {"weight": packed.dequantize(), "weight_scale": tensors["weight_scale"]}
    if isinstance(packed, IntWeight) and packed.zero_points is not None:
        state["weight_zero_point"] = (packed.zero_points.to(torch.int16) - 2 ** (scheme.bits - 1)).to(torch.int8)
    group = quantization.QuantizationScheme.model_validate({"targets": ["Linear"]} | scheme.to_dict())
    expected = compressors.BaseCompressor.get_value_from_registry(scheme.format).compress(state, group)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), expected[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize(
    ("method", "options"),
    [*(kind for kind in KINDS if kind[0] != "w8a8_int8"), ("fp8", {"granularity": "tensor"}), *CALIBRATED],
)
def test_transformers_reads_what_we_save(
    folder: Path, tmp_path: Path, method: SavedMethod, options: dict[str, Any]
) -> None:
    """Logits of a whole text within 1e-2, for every format but w8a8_int8, which the next test is about."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    output = save(folder, tmp_path / "saved", method, **options)
    # Without dequantizing, the library (0.20) expects zero points as [out, groups], though it packs them as it saves: what it
    # compresses on the meta device to have places for the tensors keeps its zero points unpacked.
    asked = CompressedTensorsConfig(dequantize=True) if options.get("zero_point") == "integer" else None
    oracle = AutoModelForCausalLM.from_pretrained(
        output, dtype=torch.float32, **({"quantization_config": asked} if asked else {})
    )
    logits, loaded = dense_logits(oracle.eval(), IDS), load(output)
    for index, layer in enumerate(oracle.model.layers):
        ours = packed_layers(loaded)[f"layers.{index}.mlp.down"].dequantize()
        torch.testing.assert_close(layer.mlp.down_proj.weight, ours, atol=0, rtol=1e-6)
    # Far less than the 1e-2 that would do: a model of thirty layers and wide rows adds up many such differences.
    torch.testing.assert_close(paged_logits(loaded.model, IDS), logits, atol=1e-4, rtol=0)
    assert (logits - dense_logits(folder, IDS)).abs().max() > 5e-2


def test_int8_activations_differ_from_transformers_at_ties_only(folder: Path, tmp_path: Path) -> None:
    """Logits agree wherever the codes of activations do, and codes only where a value lies in the middle of two.

    The rule is the library's own, bit for bit (`test_tokens_are_rounded_as_compressed_tensors_does`): a scale of the largest
    magnitude / 127.5 in float32, halves to even, codes -128 to 127. By it a token's largest magnitude lies in the middle of two
    codes, always. A positive one is cut off at 127; of a negative one the last bit decides between -127 and -128. That bit is
    of a sum before, whose order is not the same in two programs, and a rule of ours with /127 would have no such ties but
    would compute another model than the one that was saved. Each token is a text of its own, as one tie changes all behind it.
    """
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    output = save(folder, tmp_path / "saved", "w8a8_int8")
    oracle, loaded = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval(), load(output)
    ours, theirs = [], []
    for index in range(3):
        for our_name, their_name in PROJECTIONS.items():
            for module, seen in (
                (loaded.model.get_submodule(f"layers.{index}.{our_name}"), ours),
                (oracle.model.layers[index].get_submodule(their_name[0]), theirs),
            ):
                module.register_forward_pre_hook(lambda _, values, seen=seen: seen.append(values[0].reshape(1, -1)))
    num_equal = 0
    for id in IDS:
        ours.clear()
        theirs.clear()
        error = (paged_logits(loaded.model, [id]) - dense_logits(oracle, [id])).abs().max()
        assert len(ours) == len(theirs) == 3 * 4
        for x, y in zip(ours, theirs, strict=True):
            (codes, scales), (their_codes, their_scales) = quantize_tokens_int8(x), quantize_tokens_int8(y)
            differing = codes != their_codes
            if differing.any():
                places = torch.stack((x / scales, y / their_scales))[:, differing]
                assert ((places - places.floor() - 0.5).abs() < 1e-3).all()
                assert ((codes.int() - their_codes.int()).abs() <= 1).all()
                break  # what follows is computed from other numbers
        else:
            num_equal += 1
            assert error < 1e-4
    assert num_equal > len(IDS) / 2


@pytest.mark.parametrize("method", ["w8a8_int8", "fp8"])
def test_activations_are_rounded_as_transformers_rounds_them(folder: Path, tmp_path: Path, method: SavedMethod) -> None:
    """Each layer's outputs of the very inputs that it has there: no code may be another one."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    output = save(folder, tmp_path / "saved", method)
    oracle = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    inputs, outputs = {}, {}

    def remember(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, values: tuple[torch.Tensor], result: torch.Tensor) -> None:
            inputs[name], outputs[name] = values[0][0], result[0]

        return hook

    for index, layer in enumerate(oracle.model.layers):
        for name, projection in layer.named_modules():
            if name.endswith("_proj"):
                projection.register_forward_hook(remember(f"{index}.{name}"))
    dense_logits(oracle, IDS)
    model = load(output).model
    for index in range(3):
        for ours, theirs in PROJECTIONS.items():
            y = model.get_submodule(f"layers.{index}.{ours}")(inputs[f"{index}.{theirs[0]}"])
            expected = torch.cat([outputs[f"{index}.{name}"] for name in theirs], dim=1)
            torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)


def test_a_model_by_the_library_is_read(folder: Path, tmp_path: Path) -> None:
    """Its own compressor, with bfloat16 scales, an order of its own and a class as the target."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    tensors, dense = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        dense[name] = tensors[name] = weight
        if "_proj.weight" in name:
            groups = weight.view(weight.shape[0], -1, 32)
            low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
            scale = ((high - low) / 15).bfloat16()
            zero = (-8 - low / scale.float()).round().clamp(-8, 7).to(torch.int8)
            state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
            compressed = compressor.compress(state, scheme)
            del tensors[name]
            tensors |= {name.removesuffix("weight") + suffix: value for suffix, value in compressed.items()}
            steps = scale.float().repeat_interleave(32, 1)
            offset = zero.float().repeat_interleave(32, 1)
            dense[name] = ((weight / steps + offset).round().clamp(-8, 7) - offset) * steps
    config = json.loads((folder / "config.json").read_text())
    whole = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", quantization_status="compressed", ignore=["lm_head"]
    )
    for name, content in (("library", tensors), ("dense", dense)):
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        extra = {"quantization_config": whole.model_dump(mode="json")} if name == "library" else {}
        (tmp_path / name / "config.json").write_text(json.dumps(config | extra))
    logits = paged_logits(load(tmp_path / "library").model, IDS)
    torch.testing.assert_close(logits, paged_logits(load(tmp_path / "dense").model, IDS), atol=1e-4, rtol=0)
