"""Model folders on disk that are not whole, or cannot be written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.errors import ModelError
from backend.models import sources
from tests.models.shelf import NAME, Shelf, quiet, truncate


def cut_weights(folder: Path) -> None:
    truncate(folder / "model.safetensors")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / "servelab.json").unlink()


def cut_manifest(folder: Path) -> None:
    path = folder / "servelab.json"
    path.write_text(path.read_text()[:50])


def age_manifest(folder: Path) -> None:
    path = folder / "servelab.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))


@pytest.mark.parametrize("damage", [cut_weights, remove_weights, remove_manifest, cut_manifest, age_manifest])
def test_a_damaged_model_is_never_used_and_is_pulled_again(shelf: Shelf, damage: Callable[[Path], None]) -> None:
    folder = sources.ensure_model(NAME, quiet).path
    assert folder is not None
    damage(folder)
    assert [info.state for info in sources.list_models() if info.name == NAME] == ["damaged"]
    with pytest.raises(ModelError, match=f"build it again with: servelab models pull {NAME}"):
        sources.resolve_source(NAME)
    assert sources.ensure_model(NAME, quiet) == sources.resolve_source(NAME)
    assert len(shelf.downloads) == 2


def test_a_damaged_added_model_says_how_to_build_it_again(shelf: Shelf) -> None:
    folder = sources.add_gguf(shelf.gguf.parent / "other.gguf").path
    assert folder is not None
    cut_weights(folder)
    with pytest.raises(ModelError, match=r"model\.safetensors has .* models add PATH --name other"):
        sources.ensure_model("other", quiet)
    sources.add_gguf(shelf.gguf.parent / "other.gguf")
    assert sources.resolve_source("other").path == folder


def test_a_models_folder_that_cannot_be_written_is_one_clear_error(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "file"))
    assert [info.state for info in sources.list_models() if info.name == NAME] == ["not pulled"]
    with pytest.raises(ModelError, match=r"cannot be written to .*SERVELAB_HOME"):
        sources.ensure_model(NAME, quiet)


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match="No space left on device"):
        sources.ensure_model(NAME, quiet)
    assert shelf.leftovers() == []
    assert not (shelf.models / NAME).exists()
