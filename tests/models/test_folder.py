"""Models made of folders that are there, quantized or not, and models that are removed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from app.cli import main
from backend.errors import ModelError
from backend.models import sources, store
from backend.models.folder import model_files
from backend.models.loader import load_model
from tests.helpers import make_tiny_llama, paged_logits
from tests.models.shelf import NAME, Shelf, quiet, truncate

IDS = list(range(20))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """In several parts."""
    return make_tiny_llama(tmp_path / "Tiny", max_shard_size="100KB")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != store.MANIFEST_NAME}


def test_a_folder_is_added_as_it_is_under_its_own_name(shelf: Shelf, folder: Path) -> None:
    (folder / "notes.txt").write_text("of nobody's concern")
    (folder / "LICENSE").write_text("free")
    source = sources.add_model(folder)
    assert (source.name, source.path) == ("tiny", shelf.models / "tiny")
    assert source.path is not None
    assert sources.resolve_source("tiny") == source
    assert contents(source.path) == {name: data for name, data in contents(folder).items() if name != "notes.txt"}
    info = json.loads(json.dumps(sources.model_info("tiny")))
    assert (info["state"], info["origin"], info["quantization"]) == ("ready", str(folder), None)
    assert info["num_parameters"] == sources.model_info(str(folder))["num_parameters"]
    assert shelf.leftovers() == []
    device, dtype = torch.device("cpu"), torch.float32
    logits = [
        paged_logits(load_model(each, device=device, dtype=dtype).model, IDS)
        for each in (source, sources.resolve_source(str(folder)))
    ]
    assert torch.equal(*logits)


def test_the_copy_needs_the_folder_no_more(shelf: Shelf, folder: Path, tmp_path: Path) -> None:
    """Also of a folder of links, as the hub's cache is one."""
    links = tmp_path / "links"
    links.mkdir()
    for path in folder.iterdir():
        (links / path.name).symlink_to(path)
    sources.add_model(links, "mine")
    for path in folder.iterdir():
        path.unlink()
    assert sources.resolve_source("mine").path == shelf.models / "mine"
    assert sources.model_info("mine")["state"] == "ready"


def test_contents_tell_models_apart(shelf: Shelf, folder: Path, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", max_shard_size="100KB", seed=1)
    first, again = sources.add_model(folder, "first"), sources.add_model(folder, "again")
    assert first.revision == again.revision != sources.add_model(other).revision
    assert first.revision is not None


def test_a_name_is_not_given_twice(shelf: Shelf, folder: Path) -> None:
    sources.add_model(folder, "mine")
    with pytest.raises(ModelError, match=r"already a model 'mine'.* servelab models remove mine"):
        sources.add_model(folder, "mine")
    sources.add_gguf(shelf.gguf, "converted")
    with pytest.raises(ModelError, match="already a model 'converted'"):
        sources.add_model(folder, "converted")
    with pytest.raises(ModelError, match="stands for tiny model"):
        sources.add_model(folder, NAME)
    with pytest.raises(ModelError, match="already a model 'mine'"):
        sources.add_gguf(shelf.gguf, "mine")
    for name in ("", "a b", "../a"):
        with pytest.raises(ModelError, match="cannot name a model"):
            sources.add_model(folder, name)


def test_what_is_no_model_is_said_and_leaves_nothing(shelf: Shelf, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty/config\.json is missing"):
        sources.add_model(tmp_path / "empty")
    part = next(folder.glob("model-00002*"))
    truncate(part)
    with pytest.raises(ModelError, match=f"{part.name} is truncated"):
        sources.add_model(folder)
    part.unlink()
    with pytest.raises(ModelError, match=f"{part.name} is missing, though the index names it"):
        sources.add_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        sources.add_model(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match="GPT2LMHeadModel' is not supported"):
        sources.add_model(folder)
    assert store.stored_names() == []


def test_a_copy_that_is_ended_leaves_nothing(shelf: Shelf, folder: Path) -> None:
    told = []

    def end(what: str, done: float, total: float, unit: str) -> None:
        told.append((what, total, unit))
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sources.add_model(folder, "mine", end)
    assert told[0] == ("copying", sum(path.stat().st_size for path in model_files(folder)), "bytes")
    assert shelf.leftovers() == store.stored_names() == []


def test_a_damaged_model_is_replaced_by_a_folder(shelf: Shelf, folder: Path) -> None:
    place = sources.add_model(folder, "mine").path
    assert place is not None
    truncate(next(place.glob("*.safetensors")))
    with pytest.raises(ModelError, match="build it again with: servelab models add PATH --name mine"):
        sources.resolve_source("mine")
    assert sources.resolve_source(sources.add_model(folder, "mine").name).path == place


def test_manifests_of_earlier_models_are_read(shelf: Shelf) -> None:
    """They have none of the fields that came with folders."""
    place = sources.ensure_model(NAME, quiet).path
    assert place is not None
    manifest = asdict(store.read_manifest(place))
    del manifest["files_sha256"], manifest["quantization"]
    (place / store.MANIFEST_NAME).write_text(json.dumps(manifest))
    assert sources.resolve_source(NAME).revision == manifest["gguf_sha256"][:12]


def test_a_removed_model_is_gone_and_can_come_back(shelf: Shelf, folder: Path) -> None:
    sources.add_model(folder, "mine")
    sources.ensure_model(NAME, quiet)
    sources.remove_model("mine")
    sources.remove_model(NAME)
    assert store.stored_names() == shelf.leftovers() == []
    assert folder.is_dir()
    with pytest.raises(ModelError, match="there is no stored model 'mine'"):
        sources.remove_model("mine")
    assert sources.ensure_model(NAME, quiet).path == shelf.models / NAME
    assert sources.add_model(folder, "mine").name == "mine"


def test_nothing_else_is_removed(shelf: Shelf, folder: Path) -> None:
    sources.add_model(folder, "mine")
    for name in ("", ".", "..", "../home", str(folder), "dummy:tiny", ".locks", "mine/../mine"):
        with pytest.raises(ModelError, match=r"there is no stored model .*; there are: mine"):
            sources.remove_model(name)
    assert store.stored_names() == ["mine"]
    assert folder.is_dir()


def test_a_damaged_model_is_removed_too(shelf: Shelf, folder: Path) -> None:
    place = sources.add_model(folder, "mine").path
    assert place is not None
    (place / store.MANIFEST_NAME).unlink()
    sources.remove_model("mine")
    assert store.stored_names() == []


# The command line


def test_models_are_added_listed_and_removed_by_command(
    shelf: Shelf, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["models", "add", str(folder), "--name", "mine"]) == 0
    assert "mine is ready" in capsys.readouterr().err
    assert main(["models", "list", "--json"]) == 0
    (listed,) = [model for model in json.loads(capsys.readouterr().out) if model["name"] == "mine"]
    assert (listed["state"], listed["quantization"]) == ("ready", None)
    assert main(["generate", "hello", "--model", "mine", "--raw", "--max-tokens", "2"]) == 0
    monkeypatch.setattr("typer.confirm", lambda *arguments, **options: (_ for _ in ()).throw(AssertionError))
    assert main(["models", "remove", "no-such", "--yes"]) == 1
    assert "there is no stored model 'no-such'; there are: mine" in capsys.readouterr().err
    assert main(["models", "remove", "mine", "--yes"]) == 0
    assert "mine is deleted" in capsys.readouterr().err
    assert store.stored_names() == []


def test_a_removal_asks_first(
    shelf: Shelf, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer

    asked = []

    def refuse(text: str, **options: object) -> None:
        asked.append(text)
        raise typer.Abort

    sources.add_model(folder, "mine")
    monkeypatch.setattr("typer.confirm", refuse)
    assert main(["models", "remove", "mine"]) == 1
    assert str(shelf.models / "mine") in asked[0]
    assert store.stored_names() == ["mine"]
