"""`RunQueue`: one run after another on one device, a workload's from its model's download to its summary."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from backend.config import EngineConfig
from backend.errors import ConfigError, EngineError, ServeLabError
from backend.experiments.flight import Flight, under_way
from backend.experiments.run_jobs import Job, LoadedInfo, RunHost, Task, TaskJob, WorkloadJob
from backend.experiments.runner import WorkloadResult, run_workload
from backend.metrics.environment import environment
from backend.metrics.gpu_monitor import TelemetrySampler
from backend.metrics.live import LiveRun, LiveSnapshot
from backend.metrics.sinks import PeakSink, SinkGroup
from backend.metrics.stats import Phase, RunEnd, RunStart, StatsSink
from backend.metrics.summary import summarize
from backend.workload.datasets import (
    build_requests,
    build_warmup_requests,
    count_requests,
    prompts_digest,
    workload_notices,
)
from backend.workload.spec import Workload
from backend.workload.targets import Target

logger = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 1.0

ProgressCallback = Callable[[str, float, float, str], None]  # what, done, total, unit


class _Cancelled(Exception):
    """Leaves a download or a load from within its progress callback."""


class RunQueue:
    """Runs what is submitted, in order, on a thread of its own. Every method may be called from any thread.

    A run outlives whoever submitted it: it belongs to the queue and its sinks. Its phases are "queued", "pulling",
    "loading", "warming up", "running" and "writing". Whatever happens, each of its sinks gets exactly one `on_run_end`.

    Args:
        host: the engine, of which the queue is the only one to load models, but for who has borrowed it alone.
        ensure_model: makes a model's files available, by default `backend.models.sources.ensure_model`.
        make_target: gives the target of the loaded engine, by default an `InProcessTarget`.
    """

    def __init__(
        self,
        host: RunHost,
        *,
        ensure_model: Callable[[str, ProgressCallback], object] | None = None,
        make_target: Callable[[Any], Target] | None = None,
    ) -> None:
        self._host = host
        self._ensure_model = ensure_model or _ensure_model
        self._make_target = make_target or _in_process_target
        self._changed = threading.Condition()
        self._queued: dict[int, Job] = {}
        self._active: Job | None = None
        self._last: Job | None = None
        self._pending: set[int] = set()  # queued, active, or about to be reported as ended
        self._ends: dict[int, RunEnd] = {}
        self._num_borrowers = 0  # who has the engine between two runs
        self._borrowed_alone = False
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="servelab-runs", daemon=True)
        self._thread.start()

    def submit(self, run_id: int, config: EngineConfig, workload: Workload, sinks: Sequence[StatsSink]) -> None:
        """Queue a run and return at once. Raises `EngineError` for a run id already known, or once closed."""
        num_requests, problem = 0, None
        try:
            num_requests = count_requests(workload) * workload.sampling.n
        except ConfigError as error:
            problem = error
        in_flight: dict[str, Flight] = {}
        live = LiveRun(run_id, num_requests, lambda: under_way(list(in_flight.values())))
        peaks = PeakSink()
        # The live view comes last: once it says "finished", the other sinks have the whole run.
        group = SinkGroup((peaks, *sinks, live))
        self._enqueue(WorkloadJob(run_id, live, group, config, workload, in_flight, peaks, problem))

    def submit_task(self, run_id: int, task: Task, sinks: Sequence[StatsSink]) -> None:
        """Queue a run that is no workload and has the device to itself: the engine is unloaded before.

        Returns and raises as `submit`.
        """
        live = LiveRun(run_id)
        self._enqueue(TaskJob(run_id, live, SinkGroup((*sinks, live)), task))

    def cancel(self, run_id: int) -> bool:
        """Ask for a run's end; False when it is not queued or running. One still queued has ended when this returns."""
        with self._changed:
            if self._active is not None and self._active.run_id == run_id:
                self._active.cancel.set()
                return True
            job = self._queued.pop(run_id, None)
            if job is None:
                return False
        self._finish(job, RunEnd("cancelled", time.perf_counter()))
        return True

    def live(self, run_id: int | None = None) -> LiveSnapshot | None:
        """A run as it stands: by default the active one, or else the next, or else the last that ended.

        None for a run that is neither queued nor active nor the last one.
        """
        with self._changed:
            if run_id is None:
                job = self._active or next(iter(self._queued.values()), None) or self._last
            else:
                known = (self._active, self._queued.get(run_id), self._last)
                job = next((job for job in known if job is not None and job.run_id == run_id), None)
        return job.live.snapshot() if job is not None else None

    def queued(self) -> tuple[int, ...]:
        """Runs that wait for their turn, the next one first."""
        with self._changed:
            return tuple(self._queued)

    def wait(self, run_id: int, timeout: float | None = None) -> RunEnd | None:
        """Wait until a run has ended and its sinks know; None after `timeout` seconds, or for an unknown run at once."""
        with self._changed:
            self._changed.wait_for(lambda: run_id not in self._pending, timeout)
            return self._ends.get(run_id)

    def try_borrow(self, *, alone: bool = False) -> bool:
        """Have the engine between two runs, for what is not recorded: True until `give_back`, and no run begins meanwhile.

        False, at once, while a run is queued or under way, and while somebody has the engine whom this would disturb: several
        may send requests, but who loads a model has to be alone. Raises `EngineError` once closed.
        """
        with self._changed:
            if self._closed:
                raise EngineError("ServeLab is shutting down; nothing can be asked any more")
            taken = self._borrowed_alone or (alone and self._num_borrowers > 0)
            if self._active is not None or self._queued or taken:
                return False
            self._num_borrowers += 1
            self._borrowed_alone = alone
            return True

    def give_back(self) -> None:
        """The end of what `try_borrow` began."""
        with self._changed:
            self._num_borrowers -= 1
            self._borrowed_alone = False
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel everything and wait for the ends. Safe to call twice."""
        with self._changed:
            self._closed = True
            run_ids = list(self._queued)
            if self._active is not None:
                self._active.cancel.set()
            self._changed.notify_all()
        for run_id in run_ids:
            self.cancel(run_id)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _enqueue(self, job: Job) -> None:
        with self._changed:
            if self._closed:
                raise EngineError("ServeLab is shutting down; no run can be started")
            if job.run_id in self._pending or job.run_id in self._ends:
                raise EngineError(f"run #{job.run_id} was already submitted")
            self._pending.add(job.run_id)
            self._queued[job.run_id] = job
            self._changed.notify_all()

    def _loop(self) -> None:
        while (job := self._take()) is not None:
            self._finish(job, self._run(job))

    def _take(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._queued and not self._num_borrowers))
            if self._closed:
                return None  # `close` ends what is still queued
            run_id = next(iter(self._queued))
            self._active = self._queued.pop(run_id)
            return self._active

    def _finish(self, job: Job, end: RunEnd) -> None:
        job.sinks.on_run_end(end)
        with self._changed:
            self._pending.discard(job.run_id)
            self._ends[job.run_id] = end
            self._last = job
            if self._active is job:
                self._active = None
            self._changed.notify_all()

    def _run(self, job: Job) -> RunEnd:
        """From download to summary. Whatever goes wrong becomes the run's end."""
        try:
            return self._execute(job)
        except _Cancelled:
            return RunEnd("cancelled", time.perf_counter())
        except ServeLabError as error:
            return RunEnd("failed", time.perf_counter(), error=str(error))
        except Exception as error:
            logger.exception("run #%d failed", job.run_id)
            return RunEnd("failed", time.perf_counter(), error=f"{type(error).__name__}: {error}")

    def _execute(self, job: Job) -> RunEnd:
        if isinstance(job, TaskJob):
            self._host.unload()
            return self._host.execute(lambda: job.task(job.sinks, job.cancel))
        assert isinstance(job, WorkloadJob)
        if job.problem is not None:
            raise job.problem
        info = self._prepare(job)
        vocab_size = info.model.get("vocab_size")
        max_model_len = info.resolved_config.model.max_model_len
        policy = info.resolved_config.scheduler.policy
        warmup = build_warmup_requests(job.workload, vocab_size, max_model_len)
        requests = build_requests(job.workload, vocab_size, max_model_len)
        if job.cancel.is_set():
            raise _Cancelled
        self._host.reset_peak_memory()
        cache_state = self._cache_state(job.workload)
        surroundings = environment(info.resolved_config.kernels.cpu_threads)
        load = {**info.load, "model": dict(info.model), "prompts_sha256": prompts_digest(requests)}
        job.sinks.on_run_start(
            RunStart(
                start_time=time.perf_counter(),
                resolved_config=info.resolved_config.to_dict(),
                environment=surroundings,
                load=load,
                notices=(*info.notices, *workload_notices(job.workload, max_model_len, policy)),
                cache_state=cache_state,
                num_requests=len(requests) * job.workload.sampling.n,
            )
        )
        sampler = TelemetrySampler(SAMPLE_INTERVAL_S, self._host.memory, job.sinks.on_sample)
        self._host.set_sink(job.sinks)
        sampler.start()
        try:
            result = run_workload(
                job.workload,
                self._make_target(self._host),
                job.sinks,
                warmup=warmup,
                requests=requests,
                cancel=job.cancel,
                name=f"run{job.run_id}",
                in_flight=job.in_flight,
                target_failure=self._host_failure,
                # A prompt that the warm-up has asked would be found, in a run that says its cache was empty.
                after_warmup=lambda: self._reset_prefix_cache(job.workload),
            )
        finally:
            with suppress(EngineError):  # an engine that failed has already let go of its sink
                self._host.set_sink(None)
            sampler.stop()
        return self._summarize(job, result)

    def _prepare(self, job: WorkloadJob) -> LoadedInfo:
        """Model files, then the engine. A cancel takes effect at the next sign of progress."""

        def on_phase(phase: Phase) -> None:
            if job.cancel.is_set():
                raise _Cancelled
            job.sinks.on_phase(phase)

        def on_progress(what: str, done: float, total: float, unit: str) -> None:
            on_phase(Phase("pulling", done, total, unit) if total else Phase("pulling"))

        on_phase(Phase("pulling"))
        self._ensure_model(job.config.model.name, on_progress)
        on_phase(Phase("loading"))
        info = self._host.load(job.config, on_phase)
        if job.cancel.is_set():
            raise _Cancelled
        return info

    def _cache_state(self, workload: Workload) -> dict[str, Any]:
        """What the run finds in the prefix cache, after its reset if it asks for one."""
        self._reset_prefix_cache(workload)
        num_cached_tokens = self._host.num_cached_tokens()
        return {"state": "warm" if num_cached_tokens else "cold", "num_cached_tokens": num_cached_tokens}

    def _reset_prefix_cache(self, workload: Workload) -> None:
        if workload.reset_prefix_cache:
            self._host.reset_prefix_cache()

    def _summarize(self, job: WorkloadJob, result: WorkloadResult) -> RunEnd:
        job.sinks.on_phase(Phase("writing"))
        status, error = result.status, result.error
        if status == "finished" and error is not None and self._host_failure() is not None:
            # Requests that the dying engine took down make a failed run even where others had finished.
            status = "failed"
        job.peaks.add_memory(self._host.memory().peak_memory_bytes)
        summary = summarize(
            result.requests,
            slo_limits=job.workload.slo.limits,
            kv_cache_usage_max=job.peaks.kv_cache_usage,
            swapped=job.peaks.swapped,
            peak_memory_bytes=job.peaks.memory_bytes,
        )
        return RunEnd(status, time.perf_counter(), summary if summary.num_requests else None, error)

    def _host_failure(self) -> str | None:
        state = self._host.state
        return None if state == "ready" else f"the engine stopped answering (it is {state})"


def _ensure_model(name: str, on_progress: ProgressCallback) -> object:
    from backend.models.sources import ensure_model

    return ensure_model(name, on_progress)


def _in_process_target(host: Any) -> Target:
    from backend.engine.in_process_target import InProcessTarget

    return InProcessTarget(host)
