"""The numbers that a request has for each of its tokens become bytes, see `db.packed_numbers`."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

from db.packed_numbers import unpack

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

COLUMNS = {"emission_times": False, "emission_tokens": False, "token_ids": True}  # name -> nullable
BATCH_ROWS = 500


def upgrade() -> None:
    """What is there stays JSON text, as bytes: the type reads both."""
    _alter(sa.JSON(), sa.LargeBinary(), "convert_to({}::text, 'UTF8')", "BLOB")


def downgrade() -> None:
    _write_as_text()
    _alter(sa.LargeBinary(), sa.JSON(), "convert_from({}, 'UTF8')::json", "TEXT")


def _alter(existing: sa.types.TypeEngine[Any], new: sa.types.TypeEngine[Any], using: str, sqlite_kind: str) -> None:
    with op.batch_alter_table("requests") as batch:
        for name, nullable in COLUMNS.items():
            batch.alter_column(
                name,
                existing_type=existing,
                type_=new,
                existing_nullable=nullable,
                postgresql_using=using.format(name),
            )
    if op.get_bind().dialect.name == "sqlite":  # where a value has a type of its own, whatever the column's
        casts = ", ".join(f"{name} = CAST({name} AS {sqlite_kind})" for name in COLUMNS)
        op.execute(f"UPDATE requests SET {casts}")


def _write_as_text() -> None:
    """Bytes of JSON in place of packed numbers."""
    names = list(COLUMNS)
    requests = sa.table("requests", sa.column("row_id"), *(sa.column(name, sa.LargeBinary()) for name in names))
    connection, last = op.get_bind(), 0
    query = sa.select(requests).order_by(requests.c.row_id).limit(BATCH_ROWS)
    while rows := connection.execute(query.where(requests.c.row_id > last)).all():
        for last, *values in rows:
            changes = {name: _json(data) for name, data in zip(names, values, strict=True)}
            connection.execute(sa.update(requests).where(requests.c.row_id == last).values(changes))


def _json(data: bytes | None) -> bytes | None:
    return None if data is None else json.dumps(unpack(data), separators=(",", ":")).encode()
