"""Loading checkpoints: what arrives where, what is said, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.errors import CapacityError, ModelError
from backend.models.decoder import Decoder
from backend.models.loader import LoadedModel, load_model
from backend.models.sources import ModelSource
from backend.models.weight_slots import weight_slots
from tests.helpers import dense_logits, make_tiny_llama, paged_logits

CPU = torch.device("cpu")
IDS = torch.randint(0, 512, (50,), generator=torch.Generator().manual_seed(1)).tolist()
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def load(folder: Path, dtype: torch.dtype = torch.float32, **kwargs: Any) -> LoadedModel:
    return load_model(ModelSource(str(folder), "folder", path=folder), device=CPU, dtype=dtype, **kwargs)


def refusal(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_tensors(folder: Path, remove: tuple[str, ...] = (), **changes: torch.Tensor) -> None:
    """Rewrite model.safetensors; dots in the names of `changes` are written as `__`."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items() if name not in remove}
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    """A value of ... leaves the key out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def assert_equals_transformers(folder: Path, loaded: LoadedModel) -> None:
    torch.testing.assert_close(paged_logits(loaded.model, IDS), dense_logits(folder, IDS), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture
def untied(untied_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untied_folder, tmp_path / "untied"))


@pytest.fixture
def tied(tied_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tied_folder, tmp_path / "tied"))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


# Everything arrives


@pytest.mark.parametrize(
    "overrides",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True, "head_dim": 24}],
    ids=["plain", "tied", "biases"],
)
def test_slots_cover_every_parameter_once(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = make_tiny_llama(tmp_path, **overrides)
    config = load(folder).config
    decoder = Decoder(config, dtype=torch.float32, device=CPU)
    for parameter in decoder.parameters():
        parameter.zero_()
    for slot in weight_slots(decoder).values():
        slot += 1
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in decoder.parameters())
    assert config.count_parameters() == sum(parameter.numel() for parameter in decoder.parameters())


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_nothing_is_left_uninitialised(
    tmp_path: Path, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "prepare", lambda self: None)
    loaded = load(make_tiny_llama(tmp_path, **overrides))
    assert not any(parameter.isnan().any() for parameter in loaded.model.parameters())
    assert not paged_logits(loaded.model, IDS).isnan().any()


def test_counts_and_progress(untied: Path) -> None:
    progress: list[tuple[float, float]] = []
    loaded = load(untied, on_progress=lambda done, total: progress.append((done, total)))
    stored = load_file(untied / "model.safetensors")
    assert loaded.num_parameters == sum(tensor.numel() for tensor in stored.values())
    assert loaded.weights_bytes == 4 * loaded.num_parameters
    assert loaded.load_seconds > 0
    assert {total for _, total in progress} == {loaded.weights_bytes}
    done = [done for done, _ in progress]
    assert done == sorted(done)
    assert done[-1] == loaded.weights_bytes
    assert len(done) >= len(stored)


def test_a_tied_head_counts_once(tied: Path) -> None:
    loaded = load(tied)
    assert loaded.model.head.weight is loaded.model.embedding
    assert loaded.num_parameters == loaded.config.count_parameters()
    assert loaded.weights_bytes == 4 * loaded.num_parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_converted_on_the_way(untied: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "prepare", lambda self: None)
    loaded = load(untied, dtype)
    stored = load_file(untied / "model.safetensors")
    slots = weight_slots(loaded.model)
    assert slots.keys() == stored.keys()
    assert all(torch.equal(slots[name], tensor.to(dtype)) for name, tensor in stored.items())
    assert loaded.weights_bytes == 2 * loaded.num_parameters


def test_sharded_equals_single(untied: Path, tmp_path: Path) -> None:
    sharded = make_tiny_llama(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(paged_logits(load(sharded).model, IDS), paged_logits(load(untied).model, IDS))


def test_needs_neither_transformers_nor_torch_where_it_says_so() -> None:
    code = (
        "import sys\n"
        "import backend.models.dummy\n"
        "assert 'torch' not in sys.modules\n"
        "import backend.models.loader\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# The output head: tied and absent it may stay random, tied and present be an error (sgl-project/sglang#1508,
# huggingface/transformers#43429)


def test_tied_and_absent(tied: Path) -> None:
    assert HEAD not in load_file(tied / "model.safetensors")
    loaded = load(tied)
    assert loaded.notices == ()
    assert_equals_transformers(tied, loaded)


def test_tied_and_equal_stays_tied(tied: Path) -> None:
    edit_tensors(tied, lm_head__weight=load_file(tied / "model.safetensors")[EMBEDDING].clone())
    loaded = load(tied)
    assert loaded.notices == ()
    assert loaded.config.tie_word_embeddings
    assert loaded.model.head.weight is loaded.model.embedding
    assert_equals_transformers(tied, loaded)


def test_tied_and_different_is_untied_with_a_notice(tied: Path) -> None:
    edit_tensors(tied, lm_head__weight=torch.randn(512, 72))
    loaded = load(tied)
    assert len(loaded.notices) == 1
    assert HEAD in loaded.notices[0]
    assert not loaded.config.tie_word_embeddings
    assert_equals_transformers(tied, loaded)


def test_untied_and_absent_is_an_error(untied: Path) -> None:
    edit_tensors(untied, remove=(HEAD,))
    message = refusal(untied)
    assert f"lacks {HEAD}" in message
    assert "tie_word_embeddings" in message


def test_without_the_flag_llama_is_untied(untied: Path) -> None:
    edit_config(untied, tie_word_embeddings=...)
    loaded = load(untied)
    assert not loaded.config.tie_word_embeddings
    assert_equals_transformers(untied, loaded)


def test_without_flag_and_head_is_an_error(tied: Path) -> None:
    edit_config(tied, tie_word_embeddings=...)
    assert f"lacks {HEAD}" in refusal(tied)


# Tensors that do not fit: biases dropped and norms left out without a word (SafeAILab/EAGLE#315, Blaizzy/mlx-vlm#1590)


@pytest.mark.parametrize("name", [EMBEDDING, "model.norm.weight", UP, "model.layers.2.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_named(untied: Path, name: str) -> None:
    edit_tensors(untied, remove=(name,))
    assert f"lacks {name}" in refusal(untied)


def test_many_missing_tensors_are_counted(untied: Path) -> None:
    edit_config(untied, num_hidden_layers=5)
    message = refusal(untied)
    assert "model.layers.3.input_layernorm.weight" in message
    assert "and 10 more" in message


def test_missing_biases_are_not_taken_for_zero(untied: Path) -> None:
    edit_config(untied, attention_bias=True)
    assert "self_attn.q_proj.bias" in refusal(untied)


def test_unused_tensors_are_listed(untied: Path) -> None:
    edit_tensors(
        untied,
        model__layers__0__self_attn__q_norm__weight=torch.ones(8),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
    )
    (notice,) = load(untied).notices
    assert "model.layers.0.self_attn.q_norm.weight" in notice
    assert "inv_freq" not in notice


def test_dropped_biases_are_listed(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, attention_bias=True)
    edit_config(folder, attention_bias=False)
    (notice,) = load(folder).notices
    assert "model.layers.0.self_attn.k_proj.bias" in notice


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [(UP, (119, 72), [120, 72]), (EMBEDDING, (500, 72), [512, 72]), ("model.norm.weight", (72, 1), [72])],
)
def test_a_wrong_shape_is_named_with_both_shapes(
    untied: Path, name: str, shape: tuple[int, ...], expected: list[int]
) -> None:
    edit_tensors(untied, **{name.replace(".", "__"): torch.randn(shape)})
    message = refusal(untied)
    for part in (name, str(list(shape)), str(expected)):
        assert part in message


def test_integer_weights_are_refused(untied: Path) -> None:
    edit_tensors(untied, **{UP.replace(".", "__"): torch.zeros(120, 72, dtype=torch.int8)})
    message = refusal(untied)
    assert UP in message
    assert "I8" in message


def test_float16_forced_on_bfloat16_is_noticed(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, dtype=torch.bfloat16)
    (notice,) = load(folder, torch.float16).notices
    assert "float16" in notice
    assert "65,504" in notice
    assert load(folder, torch.bfloat16).notices == ()
    loaded = load(folder, torch.float32)
    assert loaded.notices == ()
    assert_equals_transformers(folder, loaded)


def test_weights_that_float16_cannot_hold_are_refused(untied: Path) -> None:
    large = torch.full((120, 72), 1e5)
    edit_tensors(untied, **{UP.replace(".", "__"): large})
    message = refusal(untied, torch.float16)
    assert UP in message
    assert "float16" in message
    assert load(untied, torch.bfloat16).notices == ()


def test_more_weights_than_memory_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=2**30))
    source = ModelSource("dummy:llama-3.1-8b", "dummy", shape="llama-3.1-8b")
    with pytest.raises(CapacityError) as caught:
        load_model(source, device=CPU, dtype=torch.bfloat16)
    assert "15.0 GiB" in str(caught.value)
    assert "1.0 GiB free" in str(caught.value)
