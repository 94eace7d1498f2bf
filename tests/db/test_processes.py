"""Several programs on one database, and programs that are killed.

An open dashboard may lock the writer out, whose rows are then lost (gradio-app/trackio#133, aimhubio/aim#1299); a killed run
may stay "running" for ever, or pass for finished (NovaSky-AI/SkyRL#1516, Netflix/metaflow#1112).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from sqlalchemy import text, update

import db.session
from db.models import RequestRow, RunRow
from db.repository import INTERRUPTED_ERROR, RunRepository
from db.run_rows import request_row
from db.session import Database
from tests.db.records import CONFIG, ROOT, WORKLOAD, make_request
from tests.waiting import PATIENCE_S, until


def start_program(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.db.records", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def count_requests(database: Database) -> int:
    with database.read() as session:
        return session.scalar(text("SELECT count(*) FROM requests")) or 0


def assert_integrity(database: Database) -> None:
    with database.read() as session:
        assert session.scalar(text("PRAGMA integrity_check")) == "ok"
        assert session.execute(text("PRAGMA foreign_key_check")).all() == []


def test_two_engines_and_three_viewers_and_one_long_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody meets "database is locked", no row is lost, and putting a record does not wait for the disk."""
    monkeypatch.setattr(db.session, "BUSY_TIMEOUT_S", PATIENCE_S)
    database = Database.open(url)
    repository = RunRepository(database)
    errors: list[BaseException] = []
    stop = threading.Event()

    def view() -> None:
        viewer = RunRepository(database)
        try:
            while not stop.wait(0.2):
                for run in viewer.list()[:1]:
                    viewer.set_notes(run.run_id, f"{len(viewer.requests(run.run_id))} requests seen")
        except BaseException as error:
            errors.append(error)

    viewers = [threading.Thread(target=view, daemon=True) for _ in range(3)]
    for viewer in viewers:
        viewer.start()
    engines = [start_program("record_many", url, "2000") for _ in range(2)]
    with database.read() as session:
        before = session.scalar(text("SELECT count(*) FROM requests")) or 0
        until(lambda: count_requests(database) > before + 500)
        assert session.scalar(text("SELECT count(*) FROM requests")) == before, "a reader sees one state"
    outputs = [engine.communicate(timeout=5 * PATIENCE_S) for engine in engines]
    stop.set()
    for viewer in viewers:
        viewer.join()
    assert [engine.returncode for engine in engines] == [0, 0], outputs
    assert errors == []
    for stdout, _ in outputs:
        run_id, num_statements_of_puts = map(int, stdout.split())
        assert [row["index"] for row in repository.requests(run_id)] == list(range(2000))
        run = repository.get(run_id)
        assert run is not None
        assert run.label == "." * 20, "each of its read-then-write transactions took effect"
        assert num_statements_of_puts == 0
    assert_integrity(database)
    database.close()


@pytest.mark.parametrize("kill_signal", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_keeps_its_records_and_is_marked_by_whoever_opens_next(
    database: Database, repository: RunRepository, url: str, kill_signal: signal.Signals
) -> None:
    mine = repository.create(CONFIG, WORKLOAD)
    with start_program("record_forever", url) as victim, start_program("record_forever", url) as survivor:
        assert victim.stdout is not None
        assert survivor.stdout is not None
        run_id, survivor_id = int(victim.stdout.readline()), int(survivor.stdout.readline())
        until(lambda: len(repository.requests(run_id)) > 20 and len(repository.requests(survivor_id)) > 0)
        before = len(repository.requests(run_id))
        victim.send_signal(kill_signal)
        os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)  # not yet collected: a zombie still has its process id
        Database.open(url).close()
        put = [int(line) for line in victim.stdout]
        victim.wait(PATIENCE_S)

        run = repository.get(run_id)
        assert run is not None
        assert (run.status, run.error, run.ended_at) == ("interrupted", INTERRUPTED_ERROR, None)
        assert [item.run_id for item in repository.list(statuses=["interrupted"])] == [run_id]
        assert repository.mark_interrupted() == []
        statuses = {item.run_id: item.status for item in repository.list()}
        assert statuses == {mine: "queued", run_id: "interrupted", survivor_id: "running"}

        stored = [row["index"] for row in repository.requests(run_id)]
        assert stored == list(range(len(stored)))
        assert before <= len(stored) <= len(put) + 1  # it may have died before it said that it had put the last one
        survivor.kill()
    assert repository.mark_interrupted() == [survivor_id]
    assert_integrity(database)


def test_records_of_a_killed_run_take_no_more_writes_by_accident(database: Database, repository: RunRepository) -> None:
    """Its row no longer changes, even if a late writer of it should still be about in another process."""
    run_id = repository.create(CONFIG, WORKLOAD)
    with database.write() as session:
        session.execute(update(RunRow).values(owner_pid=os.getppid()))
    repository.record(run_id, {"status": "interrupted", "error": INTERRUPTED_ERROR}, {})
    repository.record(
        run_id, {"status": "finished", "error": None}, {RequestRow: [request_row(run_id, make_request(0), 0)]}
    )
    run = repository.get(run_id)
    assert run is not None
    assert (run.status, run.error) == ("interrupted", INTERRUPTED_ERROR)
