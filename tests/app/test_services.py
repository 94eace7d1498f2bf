"""Services: what is opened when, and that a run is wholly recorded by the time it is said to have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.services import Services, start_run
from backend.config import EngineConfig
from backend.errors import ConfigError, DatabaseError, EngineError, ModelError, ServeLabError
from backend.workload.spec import Workload
from db.repository import RunRepository
from db.session import Database
from tests.waiting import PATIENCE_S, until

CONFIG = EngineConfig.from_dict({"model": {"name": "dummy:tiny", "device": "cpu"}, "cache": {"cpu_bytes": 2**22}})
SHORT = Workload().with_overrides({"source.limit": 4, "output_len": 4})
ENDLESS = Workload().with_overrides(
    {
        "source.kind": "synthetic",
        "source.num_requests": 20_000,
        "source.prompt_len": 4,
        "arrivals.kind": "closed_loop",
        "output_len": 64,
    }
)


class IdleHost:
    """Loads nothing, and waits inside `load` until told to go on."""

    state = "empty"
    info = None

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.closed = False

    def load(self, config: EngineConfig, on_phase: Callable[[Any], None]) -> Any:
        self.go_on.wait(PATIENCE_S)
        raise EngineError("nothing to load")

    def close(self) -> None:
        self.closed = True


def test_nothing_is_built_before_it_is_needed() -> None:
    hosts: list[IdleHost] = []

    def make_host() -> Any:
        hosts.append(IdleHost())
        return hosts[-1]

    with Services(Database.open(), make_host) as services:
        assert services.repository.list() == []
        assert hosts == []
        threads = [threading.Thread(target=lambda: services.queue) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(hosts) == 1
        assert services.host is hosts[0]
    assert hosts[0].closed


def test_an_ended_run_is_on_disk() -> None:
    with Services.open() as services:
        run_id = start_run(services, CONFIG, SHORT, "label")
        end = services.queue.wait(run_id, PATIENCE_S)
        assert end is not None
        assert end.status == "finished", end.error
        with Services.open() as other:  # another connection sees what was committed
            stored = other.repository.get(run_id)
            requests = other.repository.requests(run_id)
            steps = other.repository.steps(run_id)
        assert stored is not None
        assert (stored.status, stored.label, stored.config) == ("finished", "label", CONFIG.to_dict())
        assert sum(not request["warmup"] for request in requests) == 4
        assert sum(step["num_output_tokens"] for step in steps) == sum(r["num_output_tokens"] for r in requests)
        assert services.recording_error(run_id) is None
        assert not [thread for thread in threading.enumerate() if thread.name == f"recorder-{run_id}"]


def test_closing_cancels_and_records_what_runs_and_what_waits() -> None:
    services = Services.open()
    first = start_run(services, CONFIG, ENDLESS)
    second = start_run(services, CONFIG, SHORT)
    until(lambda: (live := services.queue.live(first)) is not None and live.num_finished > 2)
    services.close()
    services.close()
    with Services.open() as later:
        stored = {run.run_id: run for run in later.repository.list()}
        assert (stored[first].status, stored[second].status) == ("cancelled", "cancelled")
        assert any(request["status"] == "finished" for request in later.repository.requests(first))
    with pytest.raises(EngineError, match="shutting down"):
        start_run(services, CONFIG, SHORT)


def test_a_run_that_cannot_be_queued_leaves_no_open_row() -> None:
    host = IdleHost()
    host.go_on.set()
    with Services(Database.open(), lambda: host) as services:  # type: ignore[arg-type, return-value]
        services.queue.close()
        with pytest.raises(EngineError, match="shutting down"):
            start_run(services, CONFIG, SHORT)
        assert [run.status for run in services.repository.list()] == ["failed"]


def test_an_engine_that_cannot_be_built_leaves_no_row() -> None:
    def make_host() -> Any:
        raise EngineError("no driver")

    with Services(Database.open(), make_host) as services:
        with pytest.raises(EngineError, match="no driver"):
            start_run(services, CONFIG, SHORT)
        assert services.repository.list() == []


@pytest.mark.parametrize(
    ("settings", "workload", "error"),
    [
        ({"model.name": "nowhere"}, {}, ModelError),
        ({"model.name": "dummy:huge"}, {}, ModelError),
        ({}, {"source.file": "/nowhere.jsonl"}, ConfigError),
        ({}, {"source.file": "~nobody-of-this-name/x.jsonl"}, ConfigError),
        ({}, {"source.prompts": ["", "b"]}, ConfigError),
        ({}, {"sampling.min_tokens": 9}, ConfigError),
        ({}, {"source.kind": "synthetic", "source.num_requests": 2, "source.prompt_len": 2**24}, ConfigError),
    ],
)
def test_a_run_that_cannot_be_leaves_no_row_and_builds_no_engine(
    settings: dict[str, Any], workload: dict[str, Any], error: type[ServeLabError]
) -> None:
    def make_host() -> Any:
        raise AssertionError("built")

    with Services(Database.open(), make_host) as services:
        with pytest.raises(error):
            start_run(
                services, CONFIG.with_overrides(settings), Workload().with_overrides({"output_len": 4} | workload)
            )
        assert services.repository.list() == []


def test_a_database_file_that_is_deleted_meanwhile_is_told_after_the_run(tmp_path: Path) -> None:
    host = IdleHost()
    with Services(Database.open(), lambda: host) as services:  # type: ignore[arg-type, return-value]
        run_id = start_run(services, CONFIG, SHORT)
        (tmp_path / "servelab.db").unlink()
        host.go_on.set()
        assert services.queue.wait(run_id, PATIENCE_S) is not None
        said = f"run #{run_id} is not fully recorded: the database file is gone"
        assert services.recording_error(run_id) == said


def test_lost_records_are_told_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise DatabaseError("the disk is full")

    monkeypatch.setattr(RunRepository, "record", failing)
    host = IdleHost()
    host.go_on.set()
    with Services(Database.open(), lambda: host) as services:  # type: ignore[arg-type, return-value]
        run_id = start_run(services, CONFIG, SHORT)
        end = services.queue.wait(run_id, PATIENCE_S)
        assert end is not None
        assert end.status == "failed"
        assert "the disk is full" in (services.recording_error(run_id) or "")


def test_a_database_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="folder"):
        Services.open(f"sqlite:///{tmp_path}")
