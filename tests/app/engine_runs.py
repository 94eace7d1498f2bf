"""Runs of a real engine, stored by services as the pages and commands store theirs."""

from __future__ import annotations

from collections.abc import Iterable

from app.services import Services, start_run
from app.settings_input import engine_config_and_workload

PATIENCE_S = 120.0


def run_to_the_end(services: Services, lines: Iterable[str], label: str | None = None) -> int:
    """The run's id.

    Args:
        lines: settings as `servelab run --set` takes them.
    """
    run_id = start_run(services, *engine_config_and_workload(None, None, tuple(lines)), label)
    finished = services.queue.wait(run_id, PATIENCE_S)
    assert finished is not None
    assert finished.status == "finished", finished.error
    return run_id
