"""A fresh database for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from db.repository import RunRepository
from db.session import Database


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'runs.db'}"


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = Database.open(url)
    yield database
    database.close()


@pytest.fixture
def repository(database: Database) -> RunRepository:
    return RunRepository(database)
