"""`BenchmarkEngine`: the product's engine behind its host, driven and recorded as a run is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.engine.in_process_target import InProcessTarget
from backend.engine.loading import EngineInfo
from backend.errors import EngineError, ServeLabError
from backend.experiments.flight import Flight, under_way
from backend.experiments.run_queue import SAMPLE_INTERVAL_S
from backend.experiments.runner import WorkloadResult, run_workload
from backend.metrics.environment import environment
from backend.metrics.gpu_monitor import TelemetrySampler
from backend.metrics.live import LiveRun
from backend.metrics.sinks import PeakSink, SinkGroup
from backend.metrics.stats import RequestStats, RunEnd, RunStart, StatsSink
from backend.sampling_params import SamplingParams
from backend.workload.datasets import WorkloadRequest
from backend.workload.spec import ClosedLoop, Workload
from backend.workload.targets import Prompt
from db.recorder import RunRecorder
from db.repository import RunRepository
from db.session import Database


def random_requests(lengths: Sequence[tuple[int, int]], vocab_size: int) -> list[WorkloadRequest]:
    """Greedy requests of random ids that arrive together and ignore EOS.

    Args:
        lengths: (prompt, output) tokens of each.
        vocab_size: ids are drawn uniformly below it, with seed 0.
    """
    generator = np.random.default_rng(0)
    return [
        WorkloadRequest(
            index=index,
            prompt=Prompt(token_ids=tuple(generator.integers(0, vocab_size, prompt_len).tolist())),
            sampling=SamplingParams(max_tokens=output_len, ignore_eos=True),
            arrival_s=0.0,
        )
        for index, (prompt_len, output_len) in enumerate(lengths)
    ]


class BenchmarkEngine:
    """One model, loaded on first use, and loaded again after a step has failed."""

    def __init__(self, config: EngineConfig, database: Database) -> None:
        self._config = config
        self._database = database
        self._repository = RunRepository(database)
        self._host = EngineHost()
        self._load_error: ServeLabError | None = None
        self._num_passes = 0
        self.run_id: int | None = None  # of the last recorded pass

    def info(self) -> EngineInfo:
        """Raises `ServeLabError` when the model cannot be loaded, which is tried once."""
        if self._load_error is not None:
            raise self._load_error
        try:
            return self._host.load(self._config)
        except ServeLabError as error:
            self._load_error = error
            raise

    def finish(
        self, requests: Sequence[WorkloadRequest], *, recorded: bool, concurrency: int | None = None
    ) -> list[RequestStats]:
        """Run all requests to their end, as `run` does. Raises `EngineError` when one of them fails."""
        result = self.run(requests, recorded=recorded, concurrency=concurrency)
        if result.status != "finished" or result.error is not None:
            raise EngineError(result.error or f"the pass ended as {result.status}")
        return list(result.requests)

    def run(
        self,
        requests: Sequence[WorkloadRequest],
        *,
        recorded: bool,
        concurrency: int | None = None,
        cancel: threading.Event | None = None,
        in_flight: dict[str, Flight] | None = None,
    ) -> WorkloadResult:
        """One pass.

        Args:
            recorded: with the ledger and all sinks of a run; else the engine has no sink at all.
            concurrency: so many requests are under way at a time; None: all at once.
            cancel: ends the pass early.
            in_flight: where to keep the requests under way.
        """
        info = self.info()
        flights: dict[str, Flight] = {} if in_flight is None else in_flight
        self._num_passes += 1
        workload = Workload() if concurrency is None else Workload(arrivals=ClosedLoop(concurrency=concurrency))
        with self._recording(info, flights, len(requests)) if recorded else _no_recording() as sink:
            return run_workload(
                workload,
                InProcessTarget(self._host),
                sink,
                warmup=(),
                requests=requests,
                cancel=cancel or threading.Event(),
                name=f"pass{self._num_passes}",
                in_flight=flights,
                target_failure=lambda: None if self._host.state == "ready" else f"the engine is {self._host.state}",
            )

    def close(self) -> None:
        self._host.close()

    @contextmanager
    def _recording(self, info: EngineInfo, in_flight: dict[str, Flight], num_requests: int) -> Iterator[StatsSink]:
        """What `RunQueue` attaches to a run: peaks, recorder and live view, and the telemetry beside them."""
        run_id = self._repository.create(self._config.to_dict(), Workload().to_dict())
        self.run_id = run_id
        recorder = RunRecorder(self._database, run_id)
        live = LiveRun(run_id, num_requests, lambda: under_way(list(in_flight.values())))
        sinks = SinkGroup((PeakSink(), recorder, live))
        sinks.on_run_start(
            RunStart(
                start_time=time.perf_counter(),
                resolved_config=info.resolved_config.to_dict(),
                environment=environment(info.resolved_config.kernels.cpu_threads),
                load=info.load,
                notices=info.notices,
                cache_state={"state": "cold", "num_cached_tokens": 0},
                num_requests=num_requests,
            )
        )
        sampler = TelemetrySampler(SAMPLE_INTERVAL_S, self._host.memory, sinks.on_sample)
        self._host.set_sink(sinks)
        sampler.start()
        try:
            yield sinks
        finally:
            with suppress(EngineError):  # an engine that failed has already let go of its sink
                self._host.set_sink(None)
            sampler.stop()
            sinks.on_run_end(RunEnd("finished", time.perf_counter()))
            recorder.close()
            if recorder.error is not None:
                raise recorder.error


@contextmanager
def _no_recording() -> Iterator[StatsSink]:
    yield SinkGroup(())
