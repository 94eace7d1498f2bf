from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
import warnings
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import text

import db.session
from backend.errors import DatabaseError
from db.migrations.schema import HEAD
from db.repository import RunRepository
from db.session import Database
from tests.db.records import CONFIG, ROOT, WORKLOAD


def assert_refused(url: str, *parts: str) -> None:
    """The error is one line, and names what it must."""
    with pytest.raises(DatabaseError) as caught:
        Database.open(url)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_connections_wait_and_enforce_foreign_keys(database: Database) -> None:
    with database.read() as session:
        pragmas = {
            name: session.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 1, "busy_timeout": 10_000, "foreign_keys": 1}


def test_the_default_is_the_users_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SERVELAB_DATABASE_URL", raising=False)
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home" / "not yet there"))
    Database.open().close()
    assert (tmp_path / "home" / "not yet there" / "servelab.db").exists()
    monkeypatch.setenv("SERVELAB_DATABASE_URL", f"sqlite:///{tmp_path}/other.db")
    Database.open().close()
    assert (tmp_path / "other.db").exists()


@pytest.mark.parametrize("name", ["a?b", "a#b", "a%20b", "100%", "a b&c=d", "?mode=ro", "né", "a:b@c"])
def test_a_folder_may_be_called_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.delenv("SERVELAB_DATABASE_URL", raising=False)
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / name))
    for count in (1, 2):
        database = Database.open()
        RunRepository(database).create(CONFIG, WORKLOAD)
        assert len(RunRepository(database).list()) == count
        database.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with sqlite3.connect(f"file:{quote(str(tmp_path / name / 'servelab.db'))}?mode=ro", uri=True) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (2,)


def test_opening_an_up_to_date_database_imports_no_alembic_and_nothing_heavy(url: str) -> None:
    Database.open(url).close()
    code = (
        f"import sys; from db.session import Database; from db.repository import RunRepository;"
        f"RunRepository(Database.open({url!r})).list();"
        "print([name for name in ('alembic', 'torch', 'numpy', 'pandas', 'pydantic') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_read_only_file_is_refused(url: str, tmp_path: Path) -> None:
    Database.open(url).close()
    file = tmp_path / "runs.db"
    file.chmod(0o444)
    assert_refused(url, str(file), "read-only", "chmod u+w")
    file.chmod(0o644)
    Database.open(url).close()


def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    assert_refused(f"sqlite:///{folder}/runs.db", str(folder), "cannot be written")
    folder.chmod(0o755)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(f"sqlite:///{tmp_path}/file/below/runs.db", str(tmp_path / "file"), "cannot be created")


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    assert_refused(f"sqlite:///{tmp_path}", str(tmp_path), "is a folder")


def test_a_file_of_another_kind_is_refused_and_left_alone(url: str, tmp_path: Path) -> None:
    content = b"not a database at all\n" * 300
    (tmp_path / "runs.db").write_bytes(content)
    assert_refused(url, str(tmp_path / "runs.db"), "is not a SQLite database")
    assert (tmp_path / "runs.db").read_bytes() == content


def test_a_database_of_another_program_is_refused_and_left_alone(url: str, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    assert_refused(url, str(tmp_path / "runs.db"), "belongs to another program")
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("songs",)]


def test_a_newer_schema_is_refused_and_left_alone(url: str, tmp_path: Path) -> None:
    Database.open(url).close()
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    assert_refused(url, str(tmp_path / "runs.db"), "newer ServeLab", "9999", HEAD, "update ServeLab")
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("9999",)


def test_a_damaged_database_is_refused(url: str, tmp_path: Path) -> None:
    Database.open(url).close()
    file = tmp_path / "runs.db"
    content = bytearray(file.read_bytes())
    content[100:4096] = b"\xff" * 3996  # the schema's page, after the file's header
    file.write_bytes(content)
    assert_refused(url, str(file), "is damaged", "restore")


def test_a_file_uri_is_taken_as_sqlite_takes_it(url: str, tmp_path: Path) -> None:
    Database.open(url).close()
    Database.open(f"sqlite:///file:{tmp_path}/runs.db?uri=true").close()
    assert [path.name for path in tmp_path.iterdir()] == ["runs.db"]
    database = Database.open(f"sqlite:///file:{tmp_path}/runs.db?mode=ro&uri=true")
    with pytest.raises(DatabaseError, match="is read-only"):
        RunRepository(database).create(CONFIG, WORKLOAD)
    database.close()


@pytest.mark.parametrize("memory", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(memory: str) -> None:
    assert_refused(memory, "in memory", "name a file")


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("no url", "must be a SQLAlchemy URL"),
        ("nosuch://host/runs", "no driver"),
        ("postgresql+nosuch://host/runs", "no driver"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url: str, part: str) -> None:
    assert_refused(url, part)


@pytest.mark.parametrize("query", ["foo=1", "timeout=2&foo=1", "uri=false&foo=1", "timeout=soon", "mode=ro"])
def test_options_that_cannot_be_used_are_refused(tmp_path: Path, query: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_refused(f"sqlite:///{tmp_path}/runs.db?{query}", "the database URL has", "option")
    assert list(tmp_path.iterdir()) == []


def test_passwords_are_not_shown() -> None:
    with pytest.raises(DatabaseError) as caught:
        Database.open("postgresql+nosuch://me:secret@host/runs")
    assert "secret" not in str(caught.value)


def test_waiting_for_another_writer_is_bounded(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db.session, "BUSY_TIMEOUT_S", 0.3)
    database = Database.open(url)
    other = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    before = time.monotonic()
    with pytest.raises(DatabaseError, match="is locked"):
        RunRepository(database).create(CONFIG, WORKLOAD)
    assert time.monotonic() - before > 0.2
    assert RunRepository(database).list() == [], "reading does not wait"
    Database.open(url).close()
    other.execute("ROLLBACK")
    other.close()
    RunRepository(database).create(CONFIG, WORKLOAD)
    database.close()


def test_a_failed_transaction_leaves_nothing(database: Database, repository: RunRepository) -> None:
    def fail_half_way() -> None:
        with database.write() as session:
            session.execute(text("DELETE FROM alembic_version"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    with database.read() as session:
        assert session.scalar(text("SELECT count(*) FROM alembic_version")) == 1


def test_closing_folds_the_log_into_the_file(database: Database, repository: RunRepository, tmp_path: Path) -> None:
    repository.create(CONFIG, WORKLOAD)
    database.close()
    database.close()
    assert [path.name for path in tmp_path.iterdir()] == ["runs.db"]
