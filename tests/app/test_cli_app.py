"""`servelab app` as a process: it serves, and a signal ends all of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.ports import unused_port
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A dashboard started from `folder`, once it answers."""
    port = unused_port()
    environment = os.environ | {"SERVELAB_DATABASE_URL": f"sqlite:///{folder / 'app.db'}", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "app", "--port", str(port)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        _wait_until_healthy(process, port)
        yield process, port
    finally:
        process.kill()
        process.wait()


def _wait_until_healthy(process: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2) as answer:
            assert answer.read() == b"ok"
            return
        time.sleep(0.1)
    raise AssertionError("the dashboard does not answer")


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_dashboard_and_all_it_started(number: signal.Signals, tmp_path: Path) -> None:
    with serving(tmp_path) as (process, port):
        busy = subprocess.run(
            [sys.executable, "-m", "app.cli", "app", "--port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert busy.returncode == 1
        assert busy.stderr.startswith(f"error: port {port} is in use on 127.0.0.1")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output
        assert f"http://127.0.0.1:{port}" in output
        assert "Traceback" not in output
        until(lambda: all(has_ended(member) for member in family))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
