from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, inspect, text

from db.migrations.schema import HEAD, alembic_config, check_schema
from db.models import Base, RequestRow, SampleRow, StepRow
from db.repository import RunRepository
from db.run_rows import request_row, sample_row, step_row
from db.session import Database, migrating_connection
from tests.db.records import CONFIG, ROOT, WORKLOAD, make_request, make_sample, make_step
from tests.waiting import PATIENCE_S

LAB_TABLES = {"kernel_results", "quantization_results"}
TABLES = {"runs", "requests", "steps", "samples", "chunks"} | LAB_TABLES


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    Database.open(url).close()
    engine = create_engine(url)
    yield engine
    engine.dispose()


def tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


def test_the_known_head_is_the_newest_migration() -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_heads() == [HEAD]


def test_migrations_make_what_the_models_say(engine: Engine) -> None:
    with engine.connect() as connection:
        assert tables(connection) == TABLES | {"alembic_version"}
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_tables_are_created_exactly_as_the_models_would(engine: Engine, tmp_path: Path) -> None:
    """What the comparison above does not see: AUTOINCREMENT, names of constraints, cascades, indexes."""
    other = create_engine(f"sqlite:///{tmp_path}/models.db")
    Base.metadata.create_all(other)

    def schema(engine: Engine) -> dict[str, set[str]]:
        with engine.connect() as connection:
            rows = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")).all()
        # Columns that were added later stand in the last line, before the closing bracket.
        parts = {
            name: {part.strip(" \t\n,)") for part in re.split(r"\n|, (?![^(]*\))", sql)} - {""} for name, sql in rows
        }
        for name, part in parts.items():  # a table that was altered by copying has its name in quotes
            if f'CREATE TABLE "{name}" (' in part:
                part ^= {f'CREATE TABLE "{name}" (', f"CREATE TABLE {name} ("}
        return {name: part for name, part in parts.items() if name != "alembic_version"}

    assert schema(engine) == schema(other)
    other.dispose()


def test_down_and_up_again(url: str, engine: Engine) -> None:
    with engine.begin() as connection:
        command.downgrade(alembic_config(connection), "base")
        assert tables(connection) == {"alembic_version"}
        assert not check_schema(connection, url)
    database = Database.open(url)
    assert RunRepository(database).create(CONFIG, WORKLOAD) == 1
    database.close()


def test_an_old_database_is_migrated_when_it_is_opened(url: str) -> None:
    """Its runs are serving runs, and ids of deleted ones stay unused."""
    database = Database.open(url)
    repository = RunRepository(database)
    kept, deleted = (repository.create(CONFIG, WORKLOAD) for _ in range(2))
    repository.record(deleted, {"status": "cancelled"}, {})
    repository.delete([deleted])
    database.close()
    old = create_engine(url)
    with old.begin() as connection:
        command.downgrade(alembic_config(connection), "0001")
        assert tables(connection) == TABLES - LAB_TABLES | {"alembic_version"}
        assert "kind" not in {column["name"] for column in inspect(connection).get_columns("runs")}
    old.dispose()
    database = Database.open(url)
    repository = RunRepository(database)
    assert [(run.run_id, run.kind, run.model) for run in repository.list()] == [(kept, "serve", "tiny")]
    new = repository.create({"experiments": ["bench"]}, {}, kind="kernels")
    assert new == deleted + 1
    repository.add_kernel_result(
        new, {"experiment": "bench", "op": "a", "implementation": "launch", "shape": "s"} | {"dtype": "float32"}
    )
    assert len(repository.kernel_results(new)) == 1
    database.close()


def test_steps_of_older_runs_have_swapped_nothing(url: str) -> None:
    database = Database.open(url)
    run_id = RunRepository(database).create(CONFIG, WORKLOAD)
    RunRepository(database).record(run_id, {}, {StepRow: [step_row(run_id, make_step(0, swapped_bytes=2**40), 0.0)]})
    assert [step["swapped_bytes"] for step in RunRepository(database).steps(run_id)] == [2**40]
    database.close()
    old = create_engine(url)
    with old.begin() as connection:
        command.downgrade(alembic_config(connection), "0002")
    old.dispose()
    database = Database.open(url)
    (step,) = RunRepository(database).steps(run_id)
    names = ("num_swapped", "num_swapped_out_blocks", "num_swapped_in_blocks", "swapped_bytes")
    assert [step[name] for name in names] == [0] * 4
    database.close()


def test_requests_of_older_runs_had_one_priority(url: str) -> None:
    database = Database.open(url)
    run_id = RunRepository(database).create(CONFIG, WORKLOAD)
    rows = [request_row(run_id, make_request(index, priority=index - 1), 0.0) for index in range(3)]
    RunRepository(database).record(run_id, {}, {RequestRow: rows})
    assert [request["priority"] for request in RunRepository(database).requests(run_id)] == [-1, 0, 1]
    database.close()
    old = create_engine(url)
    with old.begin() as connection:
        command.downgrade(alembic_config(connection), "0003")
    old.dispose()
    database = Database.open(url)
    assert [request["priority"] for request in RunRepository(database).requests(run_id)] == [0, 0, 0]
    database.close()


def test_numbers_of_older_requests_are_read_as_they_were_written(url: str) -> None:
    """They were JSON text, and stay it; what comes later is bytes, and becomes text in a downgrade."""
    database = Database.open(url)
    run_id = RunRepository(database).create(CONFIG, WORKLOAD)
    times = (100.1, 100.123456789, float("nan"))
    changes = [{"emission_times": times, "emission_tokens": (1, 300, 2**40)}, {"token_ids": None}, {"token_ids": ()}]
    rows = [request_row(run_id, make_request(index, **change), 0.0) for index, change in enumerate(changes)]
    RunRepository(database).record(run_id, {}, {RequestRow: rows})
    stored = RunRepository(database).requests(run_id)
    assert stored[0]["emission_times"] == [100.1, 100.123456789, None]
    database.close()
    old = create_engine(url)
    with old.begin() as connection:
        command.downgrade(alembic_config(connection), "0006")
        query = "SELECT emission_times, emission_tokens, token_ids FROM requests ORDER BY row_id"
        texts = connection.execute(text(query)).all()
    assert [tuple(row) for row in texts] == [
        ("[100.1,100.123456789,null]", "[1,300,1099511627776]", "[5,6,7,8]"),
        ("[102.0,102.1,102.4]", "[1,2,1]", None),
        ("[102.0,102.1,102.4]", "[1,2,1]", "[]"),
    ]
    old.dispose()
    database = Database.open(url)
    RunRepository(database).record(run_id, {}, {RequestRow: [rows[0] | {"index": 3}]})
    assert RunRepository(database).requests(run_id) == [*stored, stored[0] | {"index": 3}]
    database.close()


def test_a_downgrade_takes_kernel_runs_along(url: str, engine: Engine) -> None:
    database = Database.open(url)
    repository = RunRepository(database)
    kept = repository.create(CONFIG, WORKLOAD)
    repository.create({}, {}, kind="kernels")
    with engine.begin() as connection:
        command.downgrade(alembic_config(connection), "0001")
        assert connection.execute(text("SELECT run_id FROM runs")).scalars().all() == [kept]
    database.close()


def test_a_downgrade_takes_quantization_runs_along_and_no_others(url: str, engine: Engine) -> None:
    database = Database.open(url)
    repository = RunRepository(database)
    kept = [repository.create(CONFIG, WORKLOAD), repository.create({}, {}, kind="kernels")]
    lab = repository.create({"model": "tiny"}, {}, kind="quantization")
    repository.add_quantization_result(lab, {"variant": "int8"})
    with engine.begin() as connection:
        command.downgrade(alembic_config(connection), "0004")
        assert connection.execute(text("SELECT run_id FROM runs")).scalars().all() == kept
        assert tables(connection) == TABLES - {"quantization_results"} | {"alembic_version"}
    database.close()
    database = Database.open(url)
    new = RunRepository(database).create({"model": "tiny"}, {}, kind="quantization")
    assert new == lab + 1, "the id of a run that went is not given again"
    assert RunRepository(database).quantization_results(new) == []
    database.close()


def test_altering_a_table_keeps_the_rows_that_refer_to_it(database: Database, repository: RunRepository) -> None:
    """SQLite alters by copying and dropping; with foreign keys on, dropping `runs` would empty every other table."""
    run_id = repository.create(CONFIG, WORKLOAD)
    repository.record(run_id, {}, {SampleRow: [sample_row(run_id, make_sample(1.0), 0.0)]})
    with migrating_connection(database._engine) as connection:
        operations = Operations(MigrationContext.configure(connection, opts={"render_as_batch": True}))
        with operations.batch_alter_table("runs", recreate="always") as batch:
            batch.drop_column("notes")
    with database.read() as session:
        assert "notes" not in {column["name"] for column in inspect(session.connection()).get_columns("runs")}
        assert session.scalar(text("PRAGMA foreign_keys")) == 1, "later transactions enforce them again"
    assert len(repository.samples(run_id)) == 1


def test_several_processes_may_open_a_new_database_at_once(url: str) -> None:
    command_line = [sys.executable, "-m", "tests.db.records", "open_and_close", url]
    processes = [subprocess.Popen(command_line, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    errors = [process.communicate(timeout=2 * PATIENCE_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, errors
    with create_engine(url).connect() as connection:
        assert tables(connection) == TABLES | {"alembic_version"}
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"


def test_a_migration_that_fails_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_half_way(config: Config, _revision: str) -> None:
        config.attributes["connection"].execute(text("CREATE TABLE runs (run_id INTEGER)"))
        raise RuntimeError("half way")

    with monkeypatch.context() as patch:
        patch.setattr(command, "upgrade", fail_half_way)
        with pytest.raises(RuntimeError):
            Database.open(url)
    database = Database.open(url)
    assert RunRepository(database).list() == []
    database.close()
