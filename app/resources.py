"""The process's one `Services`: what every viewer's pages, and nothing else, reach the engine and the database through."""

from __future__ import annotations

import threading
from contextlib import suppress

from app.services import Services
from backend.errors import ServeLabError

_lock = threading.Lock()
_services: Services | None = None


def get_services() -> Services:
    """The services, opened by whoever comes first. Raises `DatabaseError`; the next caller tries again."""
    global _services
    with _lock:
        if _services is None:
            _services = Services.open()
        return _services


def install(services: Services | None) -> None:
    """Put services in the place of those that would be opened; None takes them away. Closes nothing."""
    global _services
    with _lock:
        _services = services


def close() -> None:
    """End what runs and free the device. Pages that come later open services anew."""
    global _services
    with _lock:
        services, _services = _services, None
    if services is not None:
        services.close()


def warm_up() -> None:
    """Build the engine host in the background: it imports torch, which a first page should not wait for."""

    def build() -> None:
        with suppress(ServeLabError):  # the pages say what is wrong
            _ = get_services().queue

    threading.Thread(target=build, name="warm-up", daemon=True).start()
