"""What the commands that run a lab share: services to store it with, waiting for its end, and how it ended."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from app import formatting, terminal

if TYPE_CHECKING:
    from app.services import Services
    from backend.metrics.live import LiveSnapshot
    from backend.metrics.stats import RunEnd

_POLL_S = 0.1


@contextmanager
def services(store: bool) -> Iterator[Services]:
    """Services on the user's database, or on one that goes when they close."""
    from app.services import Services

    if store:
        with Services.open() as services:
            yield services
        return
    with (
        tempfile.TemporaryDirectory(prefix="servelab-") as folder,
        Services.open(f"sqlite:///{Path(folder) / 'unstored.db'}") as services,
    ):
        yield services


def _by_variant(live: LiveSnapshot) -> tuple[str, str, None]:
    # Without a terminal a variant has one line: it has many phases, each of which is soon over.
    name = live.phase.name
    return (name.rpartition(": ")[0] or name).rstrip(","), formatting.phase_text(live.phase), None


def wait(
    services: Services,
    run_id: int,
    interruption: terminal.Interruption,
    status: terminal.Status,
    show: Callable[[LiveSnapshot], tuple[str, str, float | None]] = _by_variant,
) -> RunEnd:
    """Until the run has ended; a signal cancels it.

    Args:
        show: what is under way -> the topic of the status line, its text, and the share of it that is done.
    """
    cancelled = False
    while (end := services.queue.wait(run_id, timeout=_POLL_S)) is None:
        if interruption and not cancelled:
            status.show("cancelling")
            services.queue.cancel(run_id)
            cancelled = True
        live = services.queue.live(run_id)
        if live is not None and not cancelled:
            status.show(*show(live))
    return end


def exit_unless_finished(services: Services, run_id: int, end: RunEnd, interruption: terminal.Interruption) -> None:
    """Say why a run did not finish or was not recorded, and raise `typer.Exit`."""
    problem = end.error or (None if end.status == "finished" else f"it was {end.status}")
    if interruption:
        terminal.fail("interrupted")
        raise typer.Exit(interruption.exit_code)
    if problem or (problem := services.recording_error(run_id)):
        terminal.fail(problem)
        raise typer.Exit(1)
