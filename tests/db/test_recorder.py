from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

import db.recorder
import db.session
from backend.errors import DatabaseError
from backend.metrics.stats import Phase, RunEnd, StatsSink, summary_to_dict
from db.recorder import RunRecorder
from db.repository import RunRepository
from db.run_rows import Run
from db.session import Database
from tests.db.records import CONFIG, ROOT, WORKLOAD, make_request, make_sample, make_start, make_step, make_summary
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def recorder(database: Database, repository: RunRepository) -> Iterator[RunRecorder]:
    recorder = RunRecorder(database, repository.create(CONFIG, WORKLOAD))
    yield recorder
    recorder.close()


def get(repository: RunRepository, recorder: RunRecorder) -> Run:
    run = repository.get(recorder.run_id)
    assert run is not None
    return run


def test_a_run_from_its_start_to_its_end(repository: RunRepository, recorder: RunRecorder) -> None:
    created = time.perf_counter() - (datetime.now(UTC) - get(repository, recorder).created_at).total_seconds()
    sink: StatsSink = recorder
    seen = []

    def see() -> None:
        assert recorder.flush()
        run = get(repository, recorder)
        assert run.phase is not None
        seen.append((run.status, Phase(**run.phase)))

    sink.on_phase(Phase("pulling", 34e6, 98.4e6, "bytes"))
    see()
    sink.on_phase(Phase("loading"))
    see()
    start = make_start(time.perf_counter())
    sink.on_run_start(start)
    sink.on_phase(Phase("warming up"))
    see()
    sink.on_phase(Phase("running", 1, 2, "requests"))
    see()
    for index in range(2):
        sink.on_step(make_step(index, start.start_time))
        sink.on_request_finished(make_request(index, start.start_time))
    sink.on_chunk("steps", lambda: b"data", 0, 1)
    sink.on_sample(make_sample(start.start_time + 0.25))
    sink.on_phase(Phase("writing"))
    see()
    assert seen == [
        ("loading", Phase("pulling", 34e6, 98.4e6, "bytes")),
        ("loading", Phase("loading")),
        ("running", Phase("warming up")),
        ("running", Phase("running", 1, 2, "requests")),
        ("running", Phase("writing")),
    ]
    sink.on_run_end(RunEnd("finished", start.start_time + 2.5, make_summary()))
    recorder.close()
    assert recorder.error is None

    run = get(repository, recorder)
    assert (run.status, run.phase, run.error, run.num_requests) == ("finished", None, None, 2)
    assert run.started_at is not None
    assert run.ended_at is not None
    assert run.ended_at - run.started_at == timedelta(seconds=2.5)
    # A wall clock's reading each, with whatever this machine took in between.
    assert (
        timedelta(seconds=-1) < run.started_at - run.created_at < timedelta(seconds=time.perf_counter() - created + 1)
    )
    assert run.resolved_config == start.resolved_config
    assert (run.environment, run.load, run.cache_state) == (start.environment, start.load, start.cache_state)
    assert run.notices == list(start.notices)
    assert run.summary == summary_to_dict(make_summary())
    assert [row["step"] for row in repository.steps(run.run_id)] == [0, 1]
    assert [row["arrival_time"] for row in repository.requests(run.run_id)] == [1.0, 1.0]
    assert [row["time"] for row in repository.samples(run.run_id)] == [0.25]
    assert repository.chunks(run.run_id, "steps") == [(b"data", 0, 1)]


def test_a_run_never_goes_back(repository: RunRepository, recorder: RunRecorder) -> None:
    recorder.on_run_start(make_start())
    recorder.on_phase(Phase("loading"))
    recorder.on_phase(Phase("a phase of later versions"))
    assert recorder.flush()
    run = get(repository, recorder)
    assert (run.status, run.phase) == ("running", asdict(Phase("a phase of later versions")))


@pytest.mark.parametrize("end", [RunEnd("finished", 102.5, make_summary()), RunEnd("failed", 101.0, error="boom")])
def test_a_run_that_was_marked_interrupted_while_it_lived_goes_on(
    repository: RunRepository, recorder: RunRecorder, end: RunEnd
) -> None:
    mark = {"status": "interrupted", "error": "the process that ran it ended", "phase": None}
    recorder.on_phase(Phase("loading"))
    assert recorder.flush()
    repository.record(recorder.run_id, mark, {})
    recorder.on_run_start(make_start())
    recorder.on_phase(Phase("running", 1, 2))
    assert recorder.flush()
    run = get(repository, recorder)
    assert (run.status, run.error, run.phase) == ("running", None, asdict(Phase("running", 1, 2)))
    assert run.resolved_config == make_start().resolved_config
    repository.record(recorder.run_id, mark, {})
    recorder.on_run_end(end)
    recorder.close()
    run = get(repository, recorder)
    assert (run.status, run.error, recorder.error) == (end.status, end.error, None)
    assert (run.summary is None) == (end.summary is None)


def test_a_run_that_fails_before_it_starts(repository: RunRepository, recorder: RunRecorder) -> None:
    recorder.on_phase(Phase("loading"))
    sampled = time.perf_counter()
    recorder.on_sample(make_sample(sampled))
    recorder.on_run_end(RunEnd("failed", time.perf_counter(), error="the model is truncated"))
    recorder.close()
    run = get(repository, recorder)
    assert (run.status, run.error, run.started_at, run.summary) == ("failed", "the model is truncated", None, None)
    assert run.ended_at is not None
    assert run.ended_at >= run.created_at
    assert repository.samples(run.run_id)[0]["time"] == pytest.approx(sampled - recorder._builder._created)


def test_records_that_overtake_the_start_get_its_times(repository: RunRepository, recorder: RunRecorder) -> None:
    recorder.on_sample(make_sample(101.0))
    assert recorder.flush()
    assert repository.samples(recorder.run_id) == []
    recorder.on_run_start(make_start(100.0))
    recorder.on_sample(make_sample(102.0))
    assert recorder.flush()
    assert [row["time"] for row in repository.samples(recorder.run_id)] == [1.0, 2.0]


def test_records_are_stored_without_being_asked(repository: RunRepository, recorder: RunRecorder) -> None:
    assert db.recorder.COMMIT_INTERVAL_S < 1
    recorder.on_run_start(make_start())
    recorder.on_request_finished(make_request(0))
    until(lambda: len(repository.requests(recorder.run_id)) == 1)


def test_the_end_is_stored_at_once(
    repository: RunRepository, recorder: RunRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when the interval is over; and the caller does not wait for a disk that cannot be written."""
    monkeypatch.setattr(db.recorder, "COMMIT_INTERVAL_S", 3600.0)
    recorder.on_run_start(make_start())
    recorder.on_request_finished(make_request(0))
    other = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    recorder.on_run_end(RunEnd("cancelled", 101.0))
    assert get(repository, recorder).status == "queued"
    other.execute("ROLLBACK")
    other.close()
    until(lambda: get(repository, recorder).status == "cancelled")
    assert recorder.error is None
    assert len(repository.requests(recorder.run_id)) == 1


def test_calls_from_many_threads_all_arrive(repository: RunRepository, recorder: RunRecorder) -> None:
    def record(first: int) -> None:
        for index in range(first, first + 250):
            recorder.on_step(make_step(index))

    recorder.on_run_start(make_start())
    threads = [threading.Thread(target=record, args=(first,)) for first in range(0, 1000, 250)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert [row["step"] for row in repository.steps(recorder.run_id)] == list(range(1000))


def test_closing_without_an_end_stores_the_records_and_leaves_the_status(
    repository: RunRepository, recorder: RunRecorder
) -> None:
    recorder.on_run_start(make_start())
    recorder.on_request_finished(make_request(0))
    recorder.close()
    recorder.close()
    recorder.on_request_finished(make_request(1))
    assert recorder.flush()
    assert get(repository, recorder).status == "running"
    assert len(repository.requests(recorder.run_id)) == 1


def test_an_interpreter_that_ends_stores_what_is_left(database: Database, repository: RunRepository, url: str) -> None:
    run_id = repository.create(CONFIG, WORKLOAD)
    code = (
        "from tests.db.records import *; from db.session import Database; from db.recorder import RunRecorder;"
        f"recorder = RunRecorder(Database.open({url!r}), {run_id});"
        "recorder.on_run_start(make_start()); recorder.on_request_finished(make_request(0))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert len(repository.requests(run_id)) == 1


def make_unwritable(database: Database, pragma: str) -> None:
    """Every connection from now on refuses to write, as SQLite does on a full disk or a read-only file."""
    event.listen(database._engine, "connect", lambda connection, _: connection.execute(f"PRAGMA {pragma}"))
    database._engine.dispose()


@pytest.mark.parametrize(
    ("pragma", "cause"), [("query_only=ON", "is read-only"), ("max_page_count=1", "the disk is full")]
)
def test_a_database_that_cannot_be_written_does_not_disturb_the_run(
    database: Database,
    repository: RunRepository,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pragma: str,
    cause: str,
) -> None:
    monkeypatch.setattr(db.recorder, "COMMIT_INTERVAL_S", 0.02)
    monkeypatch.setattr(db.recorder, "RETRY_FOR_S", 0.2)
    monkeypatch.setattr(db.recorder, "RETRY_PAUSE_S", 0.05)
    recorder = RunRecorder(database, repository.create(CONFIG, WORKLOAD))
    recorder.on_run_start(make_start())
    recorder.on_request_finished(make_request(0))
    assert recorder.flush()
    make_unwritable(database, pragma)
    with caplog.at_level(logging.ERROR):
        for index in range(100):
            recorder.on_step(make_step(index, num_output_tokens=index))
            recorder.on_chunk("steps", lambda: bytes(100_000), index, index)
            time.sleep(0.005)
        recorder.on_run_end(RunEnd("finished", 101.0, make_summary()))
        recorder.close()
    assert cause in str(recorder.error)
    assert f"run #{recorder.run_id}" in str(recorder.error)
    assert [record.getMessage() for record in caplog.records] == [str(recorder.error)], "one line, not one per commit"
    assert len(repository.requests(recorder.run_id)) == 1, "what was stored before is still there"


def test_a_short_trouble_loses_nothing(
    database: Database, repository: RunRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    record = RunRepository.record

    def noting(*arguments: Any) -> None:
        try:
            record(*arguments)
        except DatabaseError:
            failed.set()
            raise

    monkeypatch.setattr(RunRepository, "record", noting)
    recorder, other = locked_out_recorder(database, repository, tmp_path, monkeypatch, retry_for_s=PATIENCE_S)
    assert failed.wait(PATIENCE_S)
    other.execute("ROLLBACK")
    recorder.on_run_end(RunEnd("finished", 101.0))
    recorder.close()
    assert recorder.error is None
    assert get(repository, recorder).status == "finished"
    assert len(repository.requests(recorder.run_id)) == 1


def test_a_long_trouble_loses_records_but_not_the_outcome(
    database: Database, repository: RunRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, other = locked_out_recorder(database, repository, tmp_path, monkeypatch, retry_for_s=0.1)
    assert recorder.flush()
    assert "is locked" in str(recorder.error)
    other.execute("ROLLBACK")
    recorder.on_request_finished(make_request(1))
    recorder.on_run_end(RunEnd("finished", 101.0, make_summary()))
    recorder.close()
    run = get(repository, recorder)
    assert (run.status, run.num_requests) == ("finished", 2)
    assert run.resolved_config == make_start().resolved_config, "the run's own row catches up"
    assert run.notices[:-1] == list(make_start().notices)
    assert run.notices[-1].startswith("Not all records of this run were stored: ")
    assert [row["index"] for row in repository.requests(run.run_id)] == [1]


def locked_out_recorder(
    database: Database, repository: RunRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry_for_s: float
) -> tuple[RunRecorder, sqlite3.Connection]:
    """A recorder with a start and a request to store, while another connection holds the write lock."""
    monkeypatch.setattr(db.session, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(db.recorder, "COMMIT_INTERVAL_S", 0.02)
    monkeypatch.setattr(db.recorder, "RETRY_FOR_S", retry_for_s)
    monkeypatch.setattr(db.recorder, "RETRY_PAUSE_S", 0.02)
    impatient = Database.open(database.url)
    recorder = RunRecorder(impatient, repository.create(CONFIG, WORKLOAD))
    other = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    recorder.on_run_start(make_start())
    recorder.on_request_finished(make_request(0))
    return recorder, other


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    Database.open(f"sqlite:///{path}.new").close()
    path.with_name(f"{path.name}.new").replace(path)


@pytest.mark.parametrize("damage", [delete, replace])
@pytest.mark.parametrize("reconnect", [False, True])
def test_a_file_that_is_gone_is_noticed_at_the_end(
    database: Database,
    repository: RunRepository,
    recorder: RunRecorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    reconnect: bool,
) -> None:
    monkeypatch.setattr(db.recorder, "RETRY_FOR_S", 3600.0)  # there is nothing to wait for
    recorder.on_run_start(make_start())
    assert recorder.flush()
    with database.read() as session:  # a connection of the pool has the old file open, as one always does
        session.connection()
        damage(tmp_path / "runs.db")
        if reconnect:
            database._engine.dispose()
        recorder.on_request_finished(make_request(0))
        recorder.on_run_end(RunEnd("finished", 101.0, make_summary()))
        recorder.close()
    assert str(recorder.error) == f"run #{recorder.run_id} is not fully recorded: the database file is gone"


def test_rows_that_cannot_be_stored_do_not_hold_back_the_end(repository: RunRepository, recorder: RunRecorder) -> None:
    recorder.on_run_start(make_start())
    recorder.on_step(make_step(0, num_output_tokens=2**70))
    recorder.on_run_end(RunEnd("finished", 101.0, make_summary()))
    recorder.close()
    run = get(repository, recorder)
    assert run.status == "finished"
    assert len(run.notices) == 2
    assert recorder.error is not None


def test_one_record_that_makes_no_sense_does_not_hold_back_the_others(
    repository: RunRepository, recorder: RunRecorder
) -> None:
    recorder.on_run_start(make_start())
    recorder.on_request_finished(make_request(0, emission_times=("soon",)))  # type: ignore[arg-type]
    recorder.on_request_finished(make_request(1))
    recorder.on_run_end(RunEnd("finished", 101.0))
    recorder.close()
    assert "RequestStats" in str(recorder.error)
    assert [row["index"] for row in repository.requests(recorder.run_id)] == [1]
    assert get(repository, recorder).status == "finished"


def test_a_run_deleted_by_another_hand_ends_quietly(
    database: Database, repository: RunRepository, recorder: RunRecorder
) -> None:
    recorder.on_run_start(make_start())
    assert recorder.flush()
    repository.record(recorder.run_id, {"status": "interrupted"}, {})
    repository.delete([recorder.run_id])
    recorder.on_step(make_step(0))
    recorder.on_run_end(RunEnd("finished", 101.0))
    recorder.close()
    assert "was deleted while it ran" in str(recorder.error)
    assert repository.list() == []


def test_steps_are_written_behind_the_step_loop_and_many_at_once(
    repository: RunRepository, recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's thread runs no statement, and a statement inserts many steps: neither waits for the disk 5,000 times."""
    monkeypatch.setattr(db.recorder, "COMMIT_INTERVAL_S", 3600.0)  # else a slow loop is many short intervals
    recorder.on_run_start(make_start())
    assert recorder.flush()
    threads: list[int] = []

    def record(*_: object) -> None:
        threads.append(threading.get_ident())

    event.listen(Engine, "before_cursor_execute", record)
    try:
        for index in range(5000):
            recorder.on_step(make_step(index))
        assert recorder.flush()
    finally:
        event.remove(Engine, "before_cursor_execute", record)
    assert threads
    assert threading.get_ident() not in threads
    assert len(threads) < 5000 / 20
    assert len(repository.steps(recorder.run_id)) == 5000
