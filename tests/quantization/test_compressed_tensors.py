"""Quantized weights in a checkpoint's files: bit for bit there and back, and as the library whose format it is reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.config import QuantizationSettings
from backend.errors import ConfigError, ModelError
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource, model_info, resolve_source
from backend.quantization.base import PackedWeight
from backend.quantization.calibration import cut_windows
from backend.quantization.formats.compressed_tensors import cut_rows, decode, encode, join_rows, scheme_of
from backend.quantization.formats.dense_words import pack_dense, unpack_dense
from backend.quantization.formats.scheme import StoredScheme
from backend.quantization.methods import make_method
from backend.quantization.quantize_model import SavedMethod, grid_settings, quantize_model
from backend.quantization.work_folder import WorkFolder
from tests.helpers import dense_logits, make_tiny_model, paged_logits

CPU = torch.device("cpu")
IDS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()
WINDOWS = cut_windows(IDS, 2, 16, 0)

INT4 = ("int4", {"bits": 4, "group_size": 32, "zero_point": "integer"})
KINDS: list[tuple[SavedMethod, dict[str, Any]]] = [
    INT4,  # type: ignore[list-item]
    ("int4", {"bits": 4, "group_size": 32, "zero_point": "none"}),
    ("int4", {"bits": 3, "group_size": 32, "zero_point": "integer"}),
    ("int4", {"bits": 5, "group_size": -1, "zero_point": "none"}),
    ("int8", {}),
    ("w8a8_int8", {}),
    ("fp8", {}),
]


def make_model(folder: Path, architecture: str = "Llama", **changes: Any) -> Path:
    """Of layers with 64 and 160 inputs."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    return make_tiny_model(folder, architecture, hidden_size=64, intermediate_size=160, **heads, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def save(folder: Path, output: Path, method: SavedMethod, **options: Any) -> Path:
    source = ModelSource(str(folder), "folder", path=folder)
    quantize_model(
        source, method, grid_settings(method, **options), WINDOWS, WorkFolder(output, force=False), device=CPU
    )
    return output


def load(folder: Path, **settings: Any) -> LoadedModel:
    quantization = QuantizationSettings.from_dict(settings)
    return load_model(resolve_source(str(folder)), device=CPU, dtype=torch.float32, quantization=quantization)


def packed_layers(loaded: LoadedModel) -> dict[str, PackedWeight]:
    return {path: each.packed for path, each in loaded.model.named_modules() if isinstance(each, QuantizedLinear)}


def random_codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (rows, columns), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [1, 31, 64, 71])
def test_a_row_of_words_is_one_long_number(bits: int, columns: int) -> None:
    codes = random_codes(3, columns, bits)
    words = pack_dense(codes, bits)
    assert words.shape == (3, math.ceil(columns * bits / 32))
    for row in range(3):
        number = sum(code << (bits * place) for place, code in enumerate(codes[row].tolist()))
        assert sum((word % 2**32) << (32 * place) for place, word in enumerate(words[row].tolist())) == number
    assert torch.equal(unpack_dense(words, bits, columns), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_words_are_the_librarys(bits: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = random_codes(5, 75, bits)
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(pack_dense(codes, bits), helpers.pack_to_int32(signed, bits))
    packed = pack_dense(codes.t(), bits).t()
    assert torch.equal(packed, helpers.pack_to_int32(signed, bits, packed_dim=0))


@pytest.mark.parametrize(
    ("method", "options"), [*KINDS[:-1], ("fp8", {"granularity": "channel"}), ("fp8", {"granularity": "tensor"})]
)
def test_a_weight_comes_back_bit_for_bit(method: str, options: dict[str, Any]) -> None:
    weight = torch.randn(30, 64, generator=torch.Generator().manual_seed(0)) * 0.05 + 0.01
    settings = QuantizationSettings.from_dict({"method": method} | options)
    made = make_method(settings)
    assert made is not None
    packed, scheme, sizes = made.quantize(weight), scheme_of(settings), [18, 5, 7]
    parts = []
    for part, rows in zip(cut_rows(packed, sizes), sizes, strict=True):
        tensors = {f"p.{name}": tensor for name, tensor in encode(part, scheme).items()}
        parts.append(decode("p", lambda name, *_, of=tensors: of[name], scheme, (rows, 64)))
    again = join_rows(parts)
    assert type(again) is type(packed)
    assert again.shape == packed.shape
    assert again.tensors().keys() == packed.tensors().keys()
    for name, tensor in packed.tensors().items():
        other = again.tensors()[name]
        assert other.dtype == tensor.dtype
        assert torch.equal(other.view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_what_the_format_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero_point = 'float' cannot be saved.*allowed: 'none', 'integer'"):
        scheme_of(QuantizationSettings(method="int4", bits=4, group_size=32, zero_point="float"))
    with pytest.raises(ConfigError, match=r"'nf4' cannot be saved.*int8, int4, w8a8_int8, fp8"):
        scheme_of(QuantizationSettings(method="nf4"))


@pytest.mark.parametrize(("method", "options"), KINDS)
def test_a_saved_model_is_the_one_quantized_as_it_is_loaded(
    folder: Path, tmp_path: Path, method: SavedMethod, options: dict[str, Any]
) -> None:
    saved = load(save(folder, tmp_path / "saved", method, **options))
    wanted = load(folder, method=method, **options)
    expected, found = packed_layers(wanted), packed_layers(saved)
    assert found.keys() == expected.keys()
    assert len(found) == saved.num_quantized_layers == 3 * 4
    for path, weight in expected.items():
        for name, tensor in weight.tensors().items():
            assert torch.equal(found[path].tensors()[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
    assert torch.equal(paged_logits(saved.model, IDS), paged_logits(wanted.model, IDS))
    assert saved.weights_bytes == wanted.weights_bytes
    assert saved.notices == ()


def test_layers_left_out_biases_and_a_tied_head(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "Qwen2", tie_word_embeddings=True)
    options = INT4[1] | {"skip": ["model.layers.0.*", "*.k_proj"]}
    saved = load(save(folder, tmp_path / "saved", "int4", **options))
    wanted = load(folder, method="int4", **options)
    assert saved.unquantized_layers == wanted.unquantized_layers
    assert len(saved.unquantized_layers) == 4 + 2
    assert torch.equal(paged_logits(saved.model, IDS), paged_logits(wanted.model, IDS))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in config["ignore"]
    assert "model.layers.0.mlp.down_proj" in config["ignore"]
    assert "model.layers.1.self_attn.v_proj" in config["ignore"]


@pytest.mark.parametrize(("method", "options"), KINDS)
def test_transformers_reads_what_we_save(
    folder: Path, tmp_path: Path, method: SavedMethod, options: dict[str, Any]
) -> None:
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
        # Dequantizing as it loads, the library multiplies in the float16 of the steps.
        torch.testing.assert_close(layer.mlp.down_proj.weight, ours, atol=0, rtol=1e-3 if asked else 1e-6)
    if method != "w8a8_int8":  # whose activations the library rounds to 256 steps around 0, and we to 255
        torch.testing.assert_close(paged_logits(loaded.model, IDS), logits, atol=1e-2, rtol=0)
    assert (logits - dense_logits(folder, IDS)).abs().max() > 5e-2


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


def test_a_quantized_model_is_described_by_its_own_numbers(folder: Path, tmp_path: Path) -> None:
    saved = save(folder, tmp_path / "saved", "int4", **INT4[1])
    assert model_info(str(saved))["num_parameters"] == model_info(str(folder))["num_parameters"]


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Of the file that holds layer 1."""
    path = folder / "model-00003-of-00004.safetensors"
    kept = load_file(path) | {f"model.layers.1.{name.replace('__', '.')}": value for name, value in tensors.items()}
    save_file({name: value for name, value in kept.items() if value is not None}, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(
        json.dumps({"weight_map": {name: file for name, file in weight_map.items() if kept.get(name, 0) is not None}})
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mlp__up_proj__weight_scale": None}, "lacks model.layers.1.mlp.up_proj.weight_scale"),
        ({"mlp__up_proj__weight_packed": torch.zeros(160, 7, dtype=torch.int32)}, "shape [160, 7] instead of [160, 8]"),
        ({"mlp__up_proj__weight_packed": torch.zeros(160, 8)}, "dtype float32 instead of int32"),
        ({"mlp__up_proj__weight_zero_point": torch.zeros(160, 2, dtype=torch.int32)}, "instead of [20, 2]"),
        ({"mlp__up_proj__weight_scale": torch.full((160, 2), math.nan).half()}, "up_proj.weight_scale has values that"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    folder: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    saved = save(folder, tmp_path / "saved", "int4", **INT4[1])
    change(saved, **changes)
    with pytest.raises(ModelError) as caught:
        load(saved)
    assert named in str(caught.value)


def test_projections_of_one_input_are_stored_alike(folder: Path, tmp_path: Path) -> None:
    saved = save(folder, tmp_path / "saved", "int4", **INT4[1])
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"]["ignore"].append("model.layers.1.self_attn.k_proj")
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"stored alike.*layers\.1\.self_attn\.k_proj: not quantized"):
        load(saved)


def test_a_quantized_model_is_not_quantized_again(folder: Path, tmp_path: Path) -> None:
    saved = save(folder, tmp_path / "saved", "int4", **INT4[1])
    with pytest.raises(
        ConfigError, match=r"quantization\.method = 'int8', but .* is quantized already \(pack-quantized, int4"
    ):
        load(saved, method="int8")
    with pytest.raises(ConfigError, match="quantized already"):
        save(saved, tmp_path / "again", "int8")


def test_schemes_say_what_they_are() -> None:
    scheme = StoredScheme("pack-quantized", 4, "group", 32, symmetric=False)
    assert str(scheme) == "pack-quantized, int4, groups of 32, zero points"
