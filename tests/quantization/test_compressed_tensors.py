"""Quantized weights in a checkpoint's files: bit for bit there and back, and what does not fit is refused."""

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
from backend.models.sources import model_info
from backend.quantization.formats.compressed_tensors import cut_rows, decode, encode, join_rows, scheme_of
from backend.quantization.formats.dense_words import pack_dense, unpack_dense
from backend.quantization.formats.scheme import StoredScheme
from backend.quantization.quantize_model import SavedMethod
from tests.helpers import paged_logits
from tests.quantization.saved_models import (
    IDS,
    INT4,
    KINDS,
    SCHEMES,
    load,
    make_model,
    packed_layers,
    quantized,
    random_codes,
    save,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


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


@pytest.mark.parametrize(("method", "options"), SCHEMES)
def test_a_weight_comes_back_bit_for_bit(method: str, options: dict[str, Any]) -> None:
    (packed, scheme), sizes = quantized(method, options), [18, 5, 7]
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
