"""How long a new process takes to its first token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.errors import EngineError
from backend.workload.targets import StreamEvent
from benchmarks.figures import Figure, attempt
from benchmarks.passes import random_requests
from benchmarks.peers import PEER, peer_figure

TIMEOUT_S = 300.0


def start_figures(model: str, settings: Sequence[str], gpu: str | None) -> Iterator[Figure]:
    """Seconds from a process's start to its first token: with no compiled kernels, and with those of the first time."""
    with tempfile.TemporaryDirectory() as cache:
        for name in ("start, cold", "start, warm"):

            def measure(name: str = name) -> Figure:
                peer = peer_figure(gpu, model, name)
                return Figure.of(model, name, "s", [_start_seconds(model, settings, cache)], peer=peer, peer_name=PEER)

            yield attempt(model, name, "s", measure)


def _start_seconds(model: str, settings: Sequence[str], cache: str) -> float:
    command = [sys.executable, "-m", "benchmarks.engine", "--start-only", model]
    command += [part for setting in settings for part in ("--set", setting)]
    root = Path(__file__).resolve().parents[1]
    surroundings = os.environ | {"TRITON_CACHE_DIR": cache}
    started = time.perf_counter()  # on Linux one clock for all processes
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=root, env=surroundings, check=False
    )
    if done.returncode:
        raise EngineError(f"the process ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1]) - started


def first_token_time(config: EngineConfig, prompt_len: int = 128) -> float:
    """When the first token of a new engine came, by `time.perf_counter`."""
    host = EngineHost()
    try:
        info = host.load(config)
        (request,) = random_requests([(prompt_len, 1)], info.model["vocab_size"])
        events: SimpleQueue[StreamEvent] = SimpleQueue()
        host.submit("first", list(request.prompt.token_ids or ()), request.sampling, events.put)
        event = events.get()
        if event.error is not None:
            raise EngineError(event.error)
        return event.time
    finally:
        host.close()
