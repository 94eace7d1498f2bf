"""Models by name: resolved, listed, described, and added from GGUF files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from backend.errors import ModelError
from backend.models import sources, store
from tests.helpers import make_tiny_llama
from tests.models.shelf import NAME, Shelf, quiet, truncate
from tests.models.tiny_gguf import tiny_gguf


def test_an_unknown_name_lists_the_known(shelf: Shelf) -> None:
    with pytest.raises(ModelError, match=r"no model 'gpt-5'; known: smollm2-135m, .*dummy:tiny"):
        sources.resolve_source("gpt-5")
    with pytest.raises(ModelError, match=r"no dummy shape 'huge'; known: .*tiny"):
        sources.resolve_source("dummy:huge")
    with pytest.raises(ModelError, match="'gpt-5' cannot be pulled; what can: smollm2-135m"):
        sources.pull_model("gpt-5", quiet)
    assert sources.is_pullable(NAME)
    assert not sources.is_pullable("dummy:tiny")


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 5000, "~nobody-of-this-name/x", "a\0b"])
def test_a_name_that_cannot_be_a_path_is_one_short_line(name: str) -> None:
    for look_up in (sources.resolve_source, sources.model_info, lambda name: sources.ensure_model(name, quiet)):
        with pytest.raises(ModelError, match="there is no") as caught:
            look_up(name)
        assert len(str(caught.value)) < 600
    with pytest.raises(ModelError):
        sources.add_gguf(name)


def test_a_name_is_checked_before_the_file_is_read(shelf: Shelf) -> None:
    def on_progress(*progress: object) -> None:
        raise AssertionError(progress)

    for name in ("", "a b", "../a", "x" * 101):
        with pytest.raises(ModelError, match="cannot name a model; allowed: letters"):
            sources.add_gguf(shelf.gguf, name, on_progress)


def test_a_hugging_face_folder_is_named_by_its_path(tmp_path: Path, shelf: Shelf) -> None:
    folder = make_tiny_llama(tmp_path / "llama", max_shard_size="100KB")
    source = sources.ensure_model(str(folder), quiet)
    assert (source.kind, source.path) == ("folder", folder)
    info = sources.model_info(str(folder))
    assert (info["state"], info["config"]["num_layers"]) == ("ready", 3)
    assert info["num_parameters"] > 100_000


def test_folders_and_files_that_are_no_models(tmp_path: Path, shelf: Shelf) -> None:
    folder = make_tiny_llama(tmp_path / "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has no weights; expected model\.safetensors"):
        sources.resolve_source(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        sources.resolve_source(str(folder))
    with pytest.raises(ModelError, match=r"servelab models add .*tiny\.gguf"):
        sources.resolve_source(str(shelf.gguf))


def test_a_dummy_is_built_in() -> None:
    source = sources.ensure_model("dummy:tiny", quiet)
    assert (source.kind, source.shape, source.path) == ("dummy", "tiny", None)


def test_a_truncated_safetensors_file_is_seen_by_info(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "llama")
    truncate(folder / "model.safetensors")
    with pytest.raises(ModelError, match="truncated"):
        sources.model_info(str(folder))
    (folder / "model.safetensors").write_bytes(b"PK" * 100)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        sources.model_info(str(folder))


def test_model_info_is_json_and_counts_parameters(shelf: Shelf) -> None:
    before = sources.model_info(NAME)
    assert (before["state"], before["num_parameters"], before["config"]) == ("not pulled", None, None)
    sources.ensure_model(NAME, quiet)
    info = json.loads(json.dumps(sources.model_info(NAME)))
    assert info["num_parameters"] == sum(weight.size for weight in tiny_gguf().weights.values())
    assert (info["state"], info["license"], info["config"]["num_layers"]) == ("ready", "Apache-2.0", 2)
    assert info["size_bytes"] == next(model.size_bytes for model in sources.list_models() if model.name == NAME)
    assert json.loads(json.dumps(sources.model_info("dummy:tiny")))["kind"] == "dummy"


# ---- GGUF files on disk ----


def test_a_file_is_added_under_its_own_name(shelf: Shelf, tmp_path: Path) -> None:
    path = Path(shutil.copy(shelf.gguf.parent / "other.gguf", tmp_path / "My-Model.Q4_1.gguf"))
    source = sources.add_gguf(path)
    assert (source.name, source.path) == ("my-model.q4_1", shelf.models / "my-model.q4_1")
    assert sources.resolve_source("my-model.q4_1") == source
    assert "my-model.q4_1" in [info.name for info in sources.list_models()]
    assert sources.model_info("my-model.q4_1")["origin"] == str(path)
    assert sources.add_gguf(path) == source, "the same file again changes nothing"


def test_the_file_of_a_pullable_model_becomes_that_model(shelf: Shelf) -> None:
    """So that a machine without network runs the default model from a copy."""
    assert sources.add_gguf(shelf.gguf).name == NAME
    assert sources.ensure_model(NAME, quiet).path == shelf.models / NAME
    assert shelf.downloads == []


def test_a_name_is_not_given_twice(shelf: Shelf) -> None:
    other = shelf.gguf.parent / "other.gguf"
    sources.add_gguf(shelf.gguf, "mine")
    with pytest.raises(ModelError, match="already a model 'mine'"):
        sources.add_gguf(other, "mine")
    with pytest.raises(ModelError, match="stands for tiny model"):
        sources.add_gguf(other, NAME)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "dummy:tiny", "with space"])
def test_names_that_no_folder_should_have(shelf: Shelf, name: str) -> None:
    with pytest.raises(ModelError, match="cannot name a model"):
        sources.add_gguf(shelf.gguf, name)


def test_a_file_that_cannot_be_converted_leaves_nothing(shelf: Shelf, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(shelf.gguf.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"bad\.gguf is a truncated"):
        sources.add_gguf(bad)
    with pytest.raises(ModelError, match="is not a file"):
        sources.add_gguf(tmp_path / "none.gguf")
    assert shelf.leftovers() == []
    assert store.stored_names() == []
