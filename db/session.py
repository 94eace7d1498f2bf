"""Opening a database: checks, connection settings, migration, and the two kinds of transaction.

SQLite runs in write-ahead mode: readers never wait, and a writer waits at most `BUSY_TIMEOUT_S` for another one. Every
transaction that may write takes the write lock when it begins, as one that first reads and then writes would be refused at
once if another process had written in between.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from backend.errors import DatabaseError
from backend.paths import database_file, database_url
from db.base import dump_json
from db.migrations.schema import check_schema, migrate
from db.repository import RunRepository

BUSY_TIMEOUT_S = 10.0
_SQLITE_OPTIONS = ("cached_statements", "check_same_thread", "detect_types", "isolation_level", "timeout", "uri")
_ELSEWHERE = "or name another database in SERVELAB_DATABASE_URL"


class Database:
    """An open, migrated database. Thread-safe; sessions are not."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.url = engine.url.render_as_string(hide_password=True)
        self._file: tuple[str, os.stat_result] | None = None
        self._read_sessions = sessionmaker(engine, expire_on_commit=False)
        self._write_sessions = sessionmaker(engine.execution_options(servelab_write=True), expire_on_commit=False)

    @classmethod
    def open(cls, url: str | None = None) -> Database:
        """Open the database at `url`, by default the user's; create it or bring its schema up to date.

        Runs whose process has ended are marked interrupted. Raises `DatabaseError` for a database that is read-only, newer
        than this program, locked, damaged or not one of ours, and for a folder that cannot be written.
        """
        url = url or database_url()
        parsed = URL.create("sqlite", database=str(database_file())) if url is None else _parse_url(url)
        if parsed.get_backend_name() == "sqlite" and not _is_file_uri(parsed):  # that is SQLite's to read
            _check_sqlite_options(parsed)
            _check_sqlite_file(parsed)
        engine = _create_engine(parsed)
        database = cls(engine)
        try:
            with _translated(database.url):
                if engine.dialect.name == "sqlite":
                    _enter_wal_mode(engine)
                with engine.connect() as connection:
                    current = check_schema(connection, database.url)
                if not current:
                    with migrating_connection(engine) as connection:
                        migrate(connection, database.url)
                if engine.dialect.name == "sqlite":
                    database._file = _opened_file(engine)
            RunRepository(database).mark_interrupted()
        except BaseException:
            engine.dispose()
            raise
        return database

    def close(self) -> None:
        """Close all connections. Safe to call twice."""
        self._engine.dispose()

    def is_file_gone(self) -> bool:
        """Whether the SQLite file was deleted or replaced since it was opened: what is written now reaches nobody."""
        if self._file is None:
            return False
        path, opened = self._file
        try:
            return not os.path.samestat(opened, os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # it may well be there: we only cannot see it

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session on one consistent state of the database. Raises `DatabaseError`."""
        with _translated(self.url), self._read_sessions.begin() as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that commits at its end and rolls back on an exception. Raises `DatabaseError`."""
        with _translated(self.url), self._write_sessions.begin() as session:
            yield session


@contextmanager
def migrating_connection(engine: Engine) -> Iterator[Connection]:
    """A transaction that holds the write lock, so that of two processes one migrates and the other waits.

    Foreign keys are off in it: SQLite alters a table by copying and dropping it, which would delete all rows referring to it.
    """
    with engine.connect().execution_options(servelab_write=True) as connection:
        if engine.dialect.name == "sqlite":
            connection.detach()  # its settings must not return to the pool
            _execute(connection, "PRAGMA foreign_keys=OFF")
        with connection.begin():
            yield connection


def _parse_url(url: str) -> URL:
    try:
        return make_url(url)
    except ArgumentError:
        raise DatabaseError(
            "the database URL cannot be read; it must be a SQLAlchemy URL such as sqlite:////home/me/servelab.db"
        ) from None


def _is_file_uri(url: URL) -> bool:
    return str(url.query.get("uri", "false")).lower() in ("true", "yes", "on", "y", "t", "1")


def _check_sqlite_options(url: URL) -> None:
    unknown = [name for name in url.query if name not in _SQLITE_OPTIONS]
    if unknown:
        raise DatabaseError(
            f"the database URL has the unknown option {unknown[0]!r}; known: {', '.join(_SQLITE_OPTIONS)}, and with "
            "uri=true those of SQLite's file: URIs"
        )


def _check_sqlite_file(url: URL) -> None:
    """Refuse by name what SQLite would refuse late or in other words, and create the folder."""
    if url.database in (None, "", ":memory:"):
        raise DatabaseError(
            "a SQLite database in memory would lose every run; name a file, as in sqlite:////home/me/servelab.db"
        )
    path = Path(str(url.database)).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(
            f"the folder {path.parent} of the database cannot be created: {error.strerror}; create it {_ELSEWHERE}"
        ) from None
    if path.is_dir():
        raise DatabaseError(f"the database {path} is a folder; name a file in it")
    if path.exists() and not _is_writable(path):
        raise DatabaseError(f"the database {path} is read-only; make it writable (chmod u+w) {_ELSEWHERE}")
    if not _is_writable(path.parent):
        raise DatabaseError(
            f"the folder {path.parent} of the database cannot be written to; SQLite keeps files beside the database, "
            f"so make it writable (chmod u+w) {_ELSEWHERE}"
        )


def _is_writable(path: Path) -> bool:
    """Also False for what nobody may write: the superuser could, but whoever took the right away meant it."""
    return os.access(path, os.W_OK) and bool(path.stat().st_mode & 0o222)


def _create_engine(url: URL) -> Engine:
    options: dict[str, Any] = {"json_serializer": dump_json}
    if url.get_backend_name() == "sqlite":
        # isolation_level None: transactions begin where `_begin` says so, and Python adds none.
        options["connect_args"] = {"timeout": BUSY_TIMEOUT_S, "isolation_level": None}
    try:
        engine = create_engine(url, **options)
    except (NoSuchModuleError, ImportError) as error:
        raise DatabaseError(f"no driver for a {url.drivername} database: {_one_line(error)}") from None
    except (ArgumentError, TypeError, ValueError) as error:
        raise DatabaseError(f"the database URL has options that cannot be used: {_one_line(error)}") from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_connection_options)
        event.listen(engine, "begin", _begin)
    return engine


def _set_connection_options(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute(
        "PRAGMA synchronous=NORMAL"
    )  # in WAL mode safe against a killed process, and spares an fsync per commit


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("servelab_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _enter_wal_mode(engine: Engine) -> None:
    """Switch to WAL; the file remembers it. SQLite does not always wait for the lock this takes, so we do."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    with engine.connect() as connection:
        while True:
            try:
                _execute(connection, "PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if _primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def _opened_file(engine: Engine) -> tuple[str, os.stat_result] | None:
    """The path of the main database as SQLite resolved it, and what lies there; None in memory."""
    with engine.connect() as connection:
        path = connection.exec_driver_sql("PRAGMA database_list").one()[2]
    return (path, os.stat(path)) if path else None


def _execute(connection: Connection, statement: str) -> None:
    """Run a pragma outside any transaction, where alone some of them have an effect."""
    dbapi_connection = connection.connection.dbapi_connection
    assert dbapi_connection is not None
    dbapi_connection.cursor().execute(statement).close()


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """Turn what the driver raises into one line that names the database and the remedy."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise DatabaseError(f"the database {where} {_explain(cause)}") from error


def _explain(error: BaseException | None) -> str:
    match _primary_code(error):
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return f"is locked: another program has been writing for over {BUSY_TIMEOUT_S:.0f} s; end it and try again"
        case sqlite3.SQLITE_READONLY:
            return f"is read-only; make file and folder writable {_ELSEWHERE}"
        case sqlite3.SQLITE_FULL:
            return "cannot grow: the disk is full; free some space"
        case sqlite3.SQLITE_CANTOPEN:
            return f"cannot be opened; make file and folder writable {_ELSEWHERE}"
        case sqlite3.SQLITE_NOTADB:
            return f"is not a SQLite database; move the file away {_ELSEWHERE}"
        case sqlite3.SQLITE_CORRUPT:
            return f"is damaged; restore it from a copy, move it away {_ELSEWHERE}"
    return f"failed: {_one_line(error)}"


def _primary_code(error: BaseException | None) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())
