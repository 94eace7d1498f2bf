"""`DashboardServer`: the dashboard as `servelab app` serves it, in a process of its own that starts runs when it is told to.

The process is `python -m benchmarks.dashboard_server PORT`. Orders come as lines of JSON on its standard input, answers leave
on its standard output; when the input ends, so does the process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from app import resources
from app.cli_app import ADDRESS, app_command
from app.services import start_run
from backend.config import EngineConfig
from backend.errors import EngineError, ServeLabError
from backend.workload.spec import Workload

START_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 300.0  # a run may have to load its model first
STOP_TIMEOUT_S = 30.0

_ROOT = Path(__file__).resolve().parents[1]
_LOG_TAIL = 500  # characters


class DashboardServer:
    """A server with a database of its own in `folder`. Once it has ended, every call says so with an `EngineError`."""

    def __init__(self, folder: Path) -> None:
        self.database_url = f"sqlite:///{folder / 'servelab.db'}"
        self.url = ""
        self._log = folder / "server.log"
        self._process: subprocess.Popen[str] | None = None
        self._answers: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()

    def start(self) -> None:
        """Start it unless it was started before, and wait until it serves."""
        if self._process is None:
            port = _free_port()
            self.url = f"http://{ADDRESS}:{port}"
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.dashboard_server", str(port)],
                    cwd=_ROOT,
                    env=os.environ | {"SERVELAB_DATABASE_URL": self.database_url},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            threading.Thread(target=self._read_answers, args=(self._process.stdout,), daemon=True).start()
        self._wait_until_up()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start_run(self, config: EngineConfig, workload: Workload) -> int:
        """Put a run into the dashboard's own queue; its id comes at once. Raises `EngineError` where it is refused."""
        assert self._process is not None, "not started"
        assert self._process.stdin is not None
        try:
            order = json.dumps({"config": config.to_dict(), "workload": workload.to_dict()})
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        return self._answer(RUN_TIMEOUT_S)["run_id"]

    def wait_for_run(self) -> None:
        """Wait until the run started last has ended and is on disk. Raises `EngineError` unless it finished."""
        answer = self._answer(RUN_TIMEOUT_S)
        if answer["status"] != "finished" or answer["error"]:
            raise EngineError(answer["error"] or f"the run ended as {answer['status']}")

    def close(self) -> None:
        """End it. Safe to call twice, and before `start`."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _answer(self, timeout: float) -> Mapping[str, Any]:
        try:
            answer = self._answers.get(timeout=timeout)
        except Empty:
            self.close()  # an answer that came later would be taken for that to another question
            raise EngineError(f"the dashboard has not answered for {timeout:.0f} s") from None
        if answer is None:
            self._answers.put(None)  # for who asks next
            raise self._ended()
        if "run_id" not in answer and "status" not in answer:
            raise EngineError(answer["error"])
        return answer

    def _read_answers(self, stream: TextIO) -> None:
        for line in stream:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def _wait_until_up(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._ended()
            try:
                with urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.05)
        raise EngineError(f"the dashboard was not up within {START_TIMEOUT_S:.0f} s")

    def _ended(self) -> EngineError:
        assert self._process is not None
        code = self._process.wait(STOP_TIMEOUT_S)
        tail = self._log.read_text(encoding="utf-8", errors="replace").strip()[-_LOG_TAIL:]
        return EngineError(f"the dashboard's process ended with {code}: {tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return probe.getsockname()[1]


def _obey(orders: TextIO, answers: TextIO) -> None:
    """Start a run for each line, and tell its id at once and its end when it comes."""

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    for line in orders:
        order = json.loads(line)
        try:
            services = resources.get_services()
            config, workload = EngineConfig.from_dict(order["config"]), Workload.from_dict(order["workload"])
            run_id = start_run(services, config, workload)
            tell(run_id=run_id)
            end = services.queue.wait(run_id)
            assert end is not None
            tell(status=end.status, error=end.error or services.recording_error(run_id))
        except ServeLabError as error:
            tell(error=str(error))
    os.kill(os.getpid(), signal.SIGTERM)  # which `servelab app` takes as the wish to shut down


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the server says belongs into its log
    threading.Thread(target=_obey, args=(sys.stdin, answers), daemon=True).start()
    app_command(int(sys.argv[1]))


if __name__ == "__main__":
    main()
