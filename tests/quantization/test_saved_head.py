"""An output head that a checkpoint stores in fewer bits: made, read again, and read by the library whose format it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.config import QuantizationSettings
from backend.errors import ModelError
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource, resolve_source
from backend.quantization.calibration import cut_windows
from backend.quantization.quantize_model import QuantizationResult, SavedMethod, grid_settings, quantize_model
from backend.quantization.work_folder import WorkFolder
from tests.helpers import dense_logits, make_tiny_llama, paged_logits

CPU = torch.device("cpu")
IDS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(1)).tolist()
WINDOWS = cut_windows(IDS, 2, 16, 0)
INT4 = {"bits": 4, "group_size": 32, "zero_point": "none"}
KINDS: list[tuple[SavedMethod, dict[str, Any]]] = [
    ("int4", INT4),
    ("int4", INT4 | {"zero_point": "integer"}),
    ("int8", {}),
    ("w8a8_int8", {}),
    ("fp8", {}),
]


def make_model(folder: Path, *, tied: bool) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    return make_tiny_llama(folder, hidden_size=64, intermediate_size=160, tie_word_embeddings=tied, **heads)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=request.param)


def save(folder: Path, output: Path, method: SavedMethod, **options: Any) -> QuantizationResult:
    source = ModelSource(str(folder), "folder", path=folder)
    settings = grid_settings(method, head="int8", **options)
    return quantize_model(source, method, settings, WINDOWS, WorkFolder(output, force=False), device=CPU)


def load(folder: Path, **settings: Any) -> LoadedModel:
    quantization = QuantizationSettings.from_dict(settings)
    return load_model(resolve_source(str(folder)), device=CPU, dtype=torch.float32, quantization=quantization)


@pytest.mark.parametrize(("method", "options"), KINDS)
def test_a_saved_head_is_the_one_quantized_as_the_model_is_loaded(
    folder: Path, tmp_path: Path, method: SavedMethod, options: dict[str, Any]
) -> None:
    result = save(folder, tmp_path / "saved", method, **options)
    saved, wanted = load(tmp_path / "saved"), load(folder, method=method, head="int8", **options)
    found, expected = saved.model.head, wanted.model.head
    assert isinstance(found, QuantizedLinear)
    for name, tensor in expected.packed.tensors().items():
        assert torch.equal(found.packed.tensors()[name], tensor)
    assert torch.equal(paged_logits(saved.model, IDS), paged_logits(wanted.model, IDS))
    assert (saved.weights_bytes, saved.num_quantized_layers) == (wanted.weights_bytes, 3 * 4)
    assert torch.equal(saved.model.embedding, wanted.model.embedding)
    assert saved.notices == ()
    assert result.notices == wanted.notices
    assert saved.unquantized_layers == ()


@pytest.mark.parametrize(("method", "options"), [kind for kind in KINDS if kind[1].get("zero_point") != "integer"])
def test_transformers_reads_it(folder: Path, tmp_path: Path, method: SavedMethod, options: dict[str, Any]) -> None:
    """Not beside zero points: for those it must dequantize as it loads, which it (5.24) does for one scheme of a model only."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    save(folder, tmp_path / "saved", method, **options)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    loaded, logits = load(tmp_path / "saved").model, dense_logits(oracle, IDS)
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(loaded.compute_logits(hidden), oracle.lm_head(hidden), atol=1e-5, rtol=0)
    if method != "w8a8_int8":  # its layers round activations, at ties this way there and that way here
        torch.testing.assert_close(paged_logits(loaded, IDS), logits, atol=1e-2, rtol=0)


def test_the_config_names_it_and_unties_it(folder: Path, tmp_path: Path) -> None:
    assert str(save(folder, tmp_path / "saved", "int4", **INT4).head) == "pack-quantized, int8, a scale per channel"
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"]["ignore"] == []
    assert [group["targets"] for group in config["quantization_config"]["config_groups"].values()] == [
        ["Linear"],
        ["lm_head"],
    ]
    stored = load(tmp_path / "saved").config.stored_quantization
    assert str(stored) == ("pack-quantized, int4, groups of 32; output head pack-quantized, int8, a scale per channel")


def test_a_head_is_read_though_the_config_ties_it(folder: Path, tmp_path: Path) -> None:
    """As some tools leave the config of a tied model whose head they have quantized."""
    save(folder, tmp_path / "saved", "int4", **INT4)
    expected = paged_logits(load(tmp_path / "saved").model, IDS)
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    assert torch.equal(paged_logits(load(tmp_path / "saved").model, IDS), expected)


def test_layers_left_out_beside_a_head(folder: Path, tmp_path: Path) -> None:
    options = INT4 | {"skip": ["*.o_proj"]}
    save(folder, tmp_path / "saved", "int4", **options)
    saved, wanted = load(tmp_path / "saved"), load(folder, method="int4", head="int8", **options)
    assert saved.unquantized_layers == wanted.unquantized_layers
    assert torch.equal(paged_logits(saved.model, IDS), paged_logits(wanted.model, IDS))


def test_a_head_that_is_named_and_not_there_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    save(folder, tmp_path / "saved", "int4", **INT4)
    path = tmp_path / "saved" / "model-00001-of-00004.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight_scale"}
    save_file(kept, path, metadata={"format": "pt"})
    index = tmp_path / "saved" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["lm_head.weight_scale"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"the checkpoint lacks lm_head\.weight_scale"):
        load(tmp_path / "saved")


def test_a_head_takes_no_memory_in_full(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose head in 32 bits would not fit loads where it fits in 8."""
    save(folder, tmp_path / "saved", "int4", **INT4)
    made: list[Any] = []
    from backend.models import loader

    class Watched(loader.Decoder):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            assert self.head.weight is not None
            made.append(self.head.weight.device.type)

    monkeypatch.setattr(loader, "Decoder", Watched)
    load(tmp_path / "saved")
    assert made == ["meta"]
