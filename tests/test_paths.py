"""Where data, models and the database lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend import paths


def test_servelab_home_moves_data_and_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path))
    monkeypatch.delenv("SERVELAB_DATABASE_URL")
    assert (paths.data_home(), paths.models_home()) == (tmp_path, tmp_path / "models")
    assert (paths.database_url(), paths.database_file()) == (None, tmp_path / "servelab.db")
    monkeypatch.setenv("SERVELAB_DATABASE_URL", "postgresql://x/y")
    assert paths.database_url() == "postgresql://x/y"


def test_without_it_they_lie_in_the_users_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SERVELAB_HOME", raising=False)
    assert paths.data_home() == tmp_path / ".local/share/servelab"
    assert paths.models_home() == tmp_path / ".cache/servelab/models"
