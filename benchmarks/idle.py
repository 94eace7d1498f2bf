"""How much of a steady decode the device does nothing: by the profiler's record of its kernels and copies, and by events.

The profiler sees all, the gaps between two kernels of a graph too, but a step of hundreds of short kernels becomes half as
long again under it (`profiled_tok_s` tells). Events around each replay of a graph cost next to nothing, and tell how long
the device waits for the next one: what lies between two replays counts as idle, small copies included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]

from backend.errors import EngineError
from backend.experiments.flight import Flight
from backend.experiments.runner import WorkloadResult
from backend.workload.datasets import WorkloadRequest
from benchmarks.passes import BenchmarkEngine

T = TypeVar("T")

SETTLE_S = 0.2  # after every request has a second token
WINDOW_S = 0.5
START_TIMEOUT_S = 60.0


def idle_share(intervals: NDArray[np.int64]) -> float:
    """Share of the span from the first start to the last end that no interval covers.

    Args:
        intervals: int64 [n, 2], start and end of each, in any order; they may overlap.

    Raises `ValueError` when there are none.
    """
    if not len(intervals):
        raise ValueError("nothing ran on the device")
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    covered_to = np.maximum.accumulate(ordered[:, 1])
    gaps = np.maximum(ordered[1:, 0] - covered_to[:-1], 0)
    span = covered_to[-1] - ordered[0, 0]
    return float(gaps.sum() / span) if span else 0.0


def measure_idle(engine: BenchmarkEngine, requests: Sequence[WorkloadRequest]) -> tuple[float, dict[str, float]]:
    """Profile `WINDOW_S` of decoding on the calling thread while the engine's steps; the share, and figures of the window.

    Raises `EngineError` when the requests fail, or end before the window does.
    """
    engine.info()
    with _profiler():
        """The first use sets the profiler up, which takes seconds."""
    profiler, tok_s = _watch(engine, requests, _profiler)
    intervals = _device_intervals(profiler)
    return idle_share(intervals), {"events": float(len(intervals)), "profiled_tok_s": tok_s}


def measure_gaps(engine: BenchmarkEngine, requests: Sequence[WorkloadRequest]) -> tuple[float, dict[str, float]]:
    """As `measure_idle`, by events around the replays of graphs. Raises `EngineError` also when there were none."""
    engine.info()
    events, tok_s = _watch(engine, requests, replay_events)
    torch.cuda.synchronize()
    if len(events) < 2:
        raise EngineError("no graph was replayed, so that there is nothing between two replays")
    origin = events[0][0]
    moments = [[origin.elapsed_time(event) * 1e6 for event in pair] for pair in events]
    replay_us = sum(end - begin for begin, end in moments) / len(moments) / 1e3
    return idle_share(np.array(moments, dtype=np.int64)), {"replay_us": replay_us, "tok_s": tok_s}


def _watch(
    engine: BenchmarkEngine, requests: Sequence[WorkloadRequest], watch: Callable[[], AbstractContextManager[T]]
) -> tuple[T, float]:
    """Hold `watch()` open for `WINDOW_S` of steady decoding; what it gave, and tokens per second meanwhile."""
    cancel, in_flight = threading.Event(), dict[str, Flight]()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(engine.run, requests, recorded=True, cancel=cancel, in_flight=in_flight)
        try:
            flights = _wait_until_decoding(run, in_flight, len(requests))
            time.sleep(SETTLE_S)
            with watch() as seen:
                begin = time.perf_counter()
                time.sleep(WINDOW_S)
                end = time.perf_counter()
                num_left = len(in_flight)
        finally:
            cancel.set()
    if num_left < len(requests):
        raise EngineError(f"{len(requests) - num_left} requests ended before the window did")
    num_tokens = sum(begin <= moment < end for flight in flights for moment in flight.emission_times)
    return seen, num_tokens / (end - begin)


@contextmanager
def replay_events() -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """The events before and after each replay of a graph, on whatever thread."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    replay = torch.cuda.CUDAGraph.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay(graph)
        end.record()
        events.append((begin, end))

    with patch.object(torch.cuda.CUDAGraph, "replay", timed):
        yield events


def _profiler() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def _wait_until_decoding(run: Future[WorkloadResult], in_flight: dict[str, Flight], num_requests: int) -> list[Flight]:
    deadline = time.perf_counter() + START_TIMEOUT_S
    while not run.done() and time.perf_counter() < deadline:
        flights = list(in_flight.values())
        if len(flights) == num_requests and all(len(flight.emission_times) > 1 for flight in flights):
            return flights
        time.sleep(0.01)
    error = run.result().error if run.done() else None
    raise EngineError(error or f"not all {num_requests} requests were decoding at once")


def _device_intervals(profiler: torch.profiler.profile) -> NDArray[np.int64]:
    """Nanoseconds, int64 [n, 2]. The raw records: a Python object for each event would take many seconds."""
    events = profiler.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
    ]
    return np.array(spans, dtype=np.int64).reshape(-1, 2)
