"""`servelab quantize`, by every method, of weights at the edge: known fault QZ-2 in files, and what no method can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.cli import main
from backend.errors import ModelError
from backend.layers.quantized_linear import QuantizedLinear
from backend.models.checkpoint import Checkpoint
from backend.models.loader import load_model
from backend.models.model_config import load_decoder_config
from backend.models.sources import ModelSource
from backend.models.weight_slots import check_weights
from tests.helpers import make_tiny_llama, make_tiny_model, paged_logits

METHODS = ("int8", "int4", "gptq", "awq", "w8a8_int8", "fp8")
all_methods = pytest.mark.parametrize("method", METHODS)
CPU = torch.device("cpu")
ZERO_ROW, ZERO_GROUP = 5, slice(32, 64)


def make(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The model, and its tensors to be changed and saved."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    make_tiny_llama(folder, hidden_size=64, intermediate_size=160, num_hidden_layers=2, **heads)
    return folder, load_file(folder / "model.safetensors")


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def quantize(folder: Path, output: Path, method: str) -> int:
    quick = ("--windows", "3", "--window-length", "64")
    return main(["quantize", str(folder), "-o", str(output), "--method", method, *quick])


@pytest.fixture(scope="module")
def with_zeros(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A row and a group of zeros, an output that is always 0, and groups of 1e-30 and of one value."""
    folder, tensors = make(tmp_path_factory.mktemp("zeros"))
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    down[ZERO_ROW] = 0.0
    down[:8, ZERO_GROUP] = 0.0
    down[8, ZERO_GROUP], down[9, ZERO_GROUP] = 1e-30, 0.125
    tensors["model.layers.1.self_attn.o_proj.weight"][:] = 0.0
    save(folder, tensors)
    return folder


@all_methods
def test_zeros_are_exact_and_nothing_is_nan(with_zeros: Path, tmp_path: Path, method: str) -> None:
    assert quantize(with_zeros, tmp_path / "out", method) == 0
    loaded = load_model(ModelSource("out", "folder", path=tmp_path / "out"), device=CPU, dtype=torch.float32)
    packed = {
        path: module.packed.dequantize()
        for path, module in loaded.model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    assert len(packed) == 2 * 4
    assert all(weight.isfinite().all() for weight in packed.values())
    down = packed["layers.0.mlp.down"]
    assert not down[ZERO_ROW].any()
    assert not down[:8, ZERO_GROUP].any()
    assert down[8, ZERO_GROUP].abs().max() < 1e-3
    assert not packed["layers.1.attention.output"].any()
    logits = paged_logits(loaded.model, list(range(100)))
    assert logits.isfinite().all()
    assert logits.std() > 0.1


@all_methods
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, value: float
) -> None:
    folder, tensors = make(tmp_path / "model")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = value
    save(folder, tensors)
    assert quantize(folder, tmp_path / "out", method) == 1
    shown = capsys.readouterr().err
    assert "model.layers.1.self_attn.k_proj.weight has 1 values that are infinite or NaN" in shown
    assert f"failed; 1 layers are in {tmp_path / '.out.partial'}" in shown
    assert not (tmp_path / "out").exists()


@all_methods
@pytest.mark.parametrize(
    ("name", "factor", "module"),
    [
        ("model.embed_tokens.weight", float("nan"), "layers.0.attention.qkv"),
        ("model.layers.0.mlp.up_proj.weight", 1e36, "layers.0.mlp.down"),
    ],
)
def test_a_model_that_gives_no_numbers_is_refused_where_they_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, name: str, factor: float, module: str
) -> None:
    """Instead of a checkpoint whose errors are NaN, or what a factorization says of such a Hessian."""
    folder, tensors = make(tmp_path / "model")
    tensors[name] *= factor
    save(folder, tensors)
    assert quantize(folder, tmp_path / "out", method) == 1
    assert f"{module} gets inputs that are infinite, NaN or" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def loading_refuses(folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        load_model(ModelSource(str(folder), "folder", path=folder), device=CPU, dtype=torch.float32)
    return str(refused.value)


Q_NORM = "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("name", "replacement", "words"),
    [
        ("model.norm.weight", None, "the checkpoint lacks model.norm.weight"),
        ("model.norm.weight", torch.ones(1), "model.norm.weight has shape [1], and config.json asks for [64]"),
        ("model.embed_tokens.weight", None, "the checkpoint lacks model.embed_tokens.weight"),
        (
            "lm_head.weight",
            None,
            "the checkpoint lacks lm_head.weight (tie_word_embeddings is not true in config.json)",
        ),
        ("lm_head.weight", torch.ones(511, 64), "lm_head.weight has shape [511, 64]"),
        (Q_NORM, None, f"the checkpoint lacks {Q_NORM}"),
        (Q_NORM, torch.ones(1), f"{Q_NORM} has shape [1], and config.json asks for [8]"),
        (Q_NORM, torch.ones(108), f"{Q_NORM} has shape [108], and config.json asks for [8]"),
        (Q_NORM, torch.ones(8, dtype=torch.int64), f"{Q_NORM} has dtype I64, which is not supported"),
        ("model.layers.0.mlp.down_proj.weight", torch.ones(64, 1), "down_proj.weight has shape [64, 1]"),
    ],
)
def test_a_model_that_does_not_load_is_not_quantized_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, replacement: Tensor | None, words: str
) -> None:
    """It is refused in the same words, before anything is written."""
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    folder = make_tiny_model(
        tmp_path / "model", "Qwen3", hidden_size=64, intermediate_size=160, num_hidden_layers=2, **heads
    )
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save(folder, tensors | ({} if replacement is None else {name: replacement}))
    problem = loading_refuses(folder)
    assert words in problem
    assert quantize(folder, tmp_path / "out", "int8") == 1
    assert problem in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tied_model_with_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model", num_hidden_layers=1, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    with Checkpoint(folder) as checkpoint:
        check_weights(load_decoder_config(folder), checkpoint)
    save(folder, tensors | {"lm_head.weight": torch.ones(511, 72)})
    with Checkpoint(folder) as checkpoint, pytest.raises(ModelError) as refused:
        check_weights(load_decoder_config(folder), checkpoint)
    assert str(refused.value) == loading_refuses(folder)
    assert "lm_head.weight has shape [511, 72]" in str(refused.value)
