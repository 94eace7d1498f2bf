"""Checkpoint files that are missing, truncated or foreign: each is named in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.errors import ModelError
from backend.models.loader import load_model
from backend.models.sources import ModelSource
from tests.helpers import make_tiny_llama

UP = "model.layers.1.mlp.up_proj.weight"


def refusal(folder: Path) -> str:
    source = ModelSource(str(folder), "folder", path=folder)
    with pytest.raises(ModelError) as caught:
        load_model(source, device=torch.device("cpu"), dtype=torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_folder, tmp_path / "copy"))


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.002, 0.5, 0.999])
def test_a_truncated_file_is_named(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "model.safetensors: truncated" in refusal(folder)


@pytest.mark.parametrize("content", [b"GGUF" + bytes(1000), b"PK\x03\x04" + bytes(1000), b"{}", b"\xff" * 100])
def test_a_foreign_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors: truncated, or not a safetensors file" in refusal(folder)


def test_a_folder_without_weights_says_what_it_holds(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "model.safetensors" in message
    assert "pytorch_model.bin" in message


def sharded_with_index(folder: Path, **changes: Any) -> Path:
    """A sharded checkpoint whose index has `changes` in its weight map (names with `__` for dots)."""
    make_tiny_llama(folder, max_shard_size="100KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= {name.replace("__", "."): file for name, file in changes.items()}
    path.write_text(json.dumps(index))
    return folder


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded_with_index(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    assert f"{shard} is missing" in refusal(folder)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    folder = sharded_with_index(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard}: truncated" in refusal(folder)


def test_a_shard_that_lacks_what_the_index_says_is_named(tmp_path: Path) -> None:
    folder = sharded_with_index(tmp_path)
    first, *_, last = sorted(path.name for path in folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    wrong = last if index[UP] == first else first
    message = refusal(sharded_with_index(folder, **{UP.replace(".", "__"): wrong}))
    assert f"{wrong}: lacks {UP}" in message


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_cannot_leave_its_folder(tmp_path: Path, file: str) -> None:
    message = refusal(sharded_with_index(tmp_path, **{UP.replace(".", "__"): file}))
    assert "index.json" in message
    assert file in message


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_named(folder: Path, content: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(folder)
