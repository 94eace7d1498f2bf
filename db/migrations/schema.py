"""Bringing a database to the schema of this program. Alembic is imported only when there is something to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from backend.errors import DatabaseError

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0007"  # newest file in versions/; known here so that opening an up-to-date database costs no import of Alembic


def check_schema(connection: Connection, where: str) -> bool:
    """Whether the schema is this program's. False for an older or an empty database.

    Raises `DatabaseError` when it is newer than this program, or belongs to another one.
    """
    revision = current_revision(connection, where)
    if revision in (None, HEAD):
        return revision == HEAD
    from alembic.script import ScriptDirectory

    known = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()]
    if revision not in known:
        raise DatabaseError(
            f"the database {where} was written by a newer ServeLab: its schema is {revision}, this one knows up to {HEAD}; "
            "update ServeLab or name another database in SERVELAB_DATABASE_URL"
        )
    return False


def migrate(connection: Connection, where: str) -> None:
    """Upgrade to `HEAD` in the caller's transaction; does nothing if another process did so meanwhile."""
    if check_schema(connection, where):
        return
    from alembic import command

    command.upgrade(alembic_config(connection), "head")


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's settings without a file. With a connection, its commands run in that connection's transaction."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def current_revision(connection: Connection, where: str) -> str | None:
    """The schema's revision; None for an empty database. Raises `DatabaseError` for another program's database."""
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return None
    revisions = []
    if "alembic_version" in tables:
        revisions = list(connection.execute(text("SELECT version_num FROM alembic_version")).scalars())
    if not revisions and tables <= {"alembic_version"}:
        return None  # downgraded to nothing
    if not revisions or "runs" not in tables:
        raise DatabaseError(
            f"the database {where} belongs to another program (it has tables but no runs of ours); "
            "name another database in SERVELAB_DATABASE_URL"
        )
    return revisions[0]
