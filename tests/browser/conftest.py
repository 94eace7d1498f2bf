"""A dashboard in a process of its own, and headless Chromium to look at it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from db.repository import RunRepository
from db.session import Database

_REPOSITORY = Path(__file__).resolve().parents[2]
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]
_PATIENCE_MS = 60_000  # the engine and the browser share the cores
_START_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 30


@dataclass(frozen=True)
class Dashboard:
    """A running server, and what it has stored."""

    url: str
    repository: RunRepository


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        message = f"NO BROWSER, THE DASHBOARD IS NOT TESTED: none of {', '.join(_NAMES)} is installed (apt-get install chromium)"
        if os.environ.get("SERVELAB_REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def dashboard(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """`servelab app` with a database of its own; SIGTERM must end it."""
    folder = tmp_path_factory.mktemp("dashboard")
    database_url = f"sqlite:///{folder / 'servelab.db'}"
    port = _free_port()
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
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(_PATIENCE_MS)
    yield context.new_page()
    context.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the dashboard did not start:\n{log.read_text(errors='replace')}")
