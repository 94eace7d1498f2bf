"""The dashboard as a user starts it, in a process of its own, and the browser to look at it with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from db.repository import RunRepository
from db.session import Database
from tests.ports import unused_port

_REPOSITORY = Path(__file__).resolve().parents[2]
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_START_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 60


@dataclass(frozen=True)
class Dashboard:
    """A running server, and what it has stored."""

    url: str
    repository: RunRepository


def browser_path() -> str | None:
    """The first Chromium on the PATH."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def require_browser() -> None:
    """Skip the calling module without a browser, in one loud line; fail where one was promised."""
    if browser_path() is None:
        message = f"NO BROWSER, THE DASHBOARD IS NOT TESTED: none of {', '.join(_BROWSERS)} is there (apt-get install chromium)"
        if os.environ.get("SERVELAB_REQUIRE_BROWSER") == "1":
            pytest.fail(message, pytrace=False)
        pytest.skip(message, allow_module_level=True)


@contextmanager
def running_dashboard(folder: Path) -> Iterator[Dashboard]:
    """`servelab app` with a database in `folder`; SIGTERM must end it."""
    database_url = f"sqlite:///{folder / 'servelab.db'}"
    port = unused_port()
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "app", "--port", str(port)],
            cwd=_REPOSITORY,
            env=os.environ | {"SERVELAB_DATABASE_URL": database_url},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, process, folder / "server.log")
        database = Database.open(database_url)
        yield Dashboard(url, RunRepository(database))
        database.close()
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_TIMEOUT_S)
        # A thread that outlives its viewer's script and still calls Streamlit says so here, and nowhere else.
        output = (folder / "server.log").read_text(errors="replace")
        assert not [word for word in ("ScriptRunContext", "Traceback") if word in output], output
    finally:
        process.kill()
        process.wait()


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the dashboard did not start:\n{log.read_text(errors='replace')}")
