"""What following a run costs: a look a second shares the interpreter with the engine's step loop."""

from __future__ import annotations

from typing import Any

import pytest

from app.components import activity, live_panel
from backend.config import EngineConfig
from backend.metrics.live import LiveRun
from backend.workload.spec import Workload
from db.run_rows import Run
from tests.app.stored_runs import FakeServices, feed_start


def test_looks_at_a_run_read_its_row_once(services: FakeServices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the page is drawn anew, or another run's turn has come."""
    first, second = (
        services.repository.create(EngineConfig().to_dict(), Workload().to_dict(), label) for label in ("a", "b")
    )
    read: list[int] = []
    drawn: list[str | None] = []
    get = services.repository.get

    def look(read_state: Any, active: Any, body: Any, every_s: float) -> None:
        for run_id in (first, first, first, second, second):
            services.fake_queue.live_run = LiveRun(run_id)
            feed_start(services.fake_queue.live_run, EngineConfig())
            body(read_state())

    def under_way(services: Any, snapshot: Any, run: Run | None) -> None:
        assert run is not None
        assert run.run_id == snapshot.run_id
        drawn.append(run.label)

    monkeypatch.setattr(services.repository, "get", lambda run_id: (read.append(run_id), get(run_id))[1])
    monkeypatch.setattr(activity, "polled", look)
    monkeypatch.setattr(live_panel, "under_way", under_way)
    live_panel.show(services)
    assert drawn == ["a", "a", "a", "b", "b"]
    assert read == [first, second]
