"""Waiting for what must come: for as long as a busy machine may take, and no longer than it needs."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0  # far beyond what anything takes that a test waits for


def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Return as soon as `condition` holds; fail when it never does."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)
