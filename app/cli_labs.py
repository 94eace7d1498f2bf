"""What the commands that run a lab share: services to store it with, and waiting for its end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from app import formatting, terminal

if TYPE_CHECKING:
    from app.services import Services
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


def wait(services: Services, run_id: int, interruption: terminal.Interruption, status: terminal.Status) -> RunEnd:
    cancelled = False
    while (end := services.queue.wait(run_id, timeout=_POLL_S)) is None:
        if interruption and not cancelled:
            status.show("cancelling")
            services.queue.cancel(run_id)
            cancelled = True
        live = services.queue.live(run_id)
        if live is not None and not cancelled:
            # Without a terminal a topic has one line: what is done of a variant, and how much, comes behind its name.
            name = live.phase.name
            status.show((name.rpartition(": ")[0] or name).rstrip(","), formatting.phase_text(live.phase))
    return end
