"""What the command line and the dashboard stand on: the database, and an engine once something must run.

Opening costs no torch. The engine host and the run queue are built on first use and live until `close`; a run belongs
to them and to the database, never to a page or a terminal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from backend.config import EngineConfig
from backend.errors import EngineError
from backend.metrics.stats import RunEnd, StatsSink
from backend.workload.spec import Workload
from db.recorder import RunRecorder
from db.repository import RunRepository
from db.session import Database

if TYPE_CHECKING:
    from backend.engine.engine_host import EngineHost
    from backend.experiments.certificate import Verdict
    from backend.experiments.certificate_config import CertificateConfig
    from backend.experiments.kernel_config import KernelLabConfig
    from backend.experiments.quantization_config import QuantizationLabConfig
    from backend.experiments.run_jobs import Task
    from backend.experiments.run_queue import RunQueue


class Services:
    """One database, at most one engine. Thread-safe."""

    def __init__(self, database: Database, make_host: Callable[[], EngineHost] | None = None) -> None:
        """
        Args:
            database: owned from here on; `close` closes it.
            make_host: builds the engine host on first use; by default `new_host`.
        """
        self.database = database
        self.repository = RunRepository(database)
        self._make_host = make_host
        self._lock = threading.RLock()
        self._host: EngineHost | None = None
        self._queue: RunQueue | None = None
        self._recorders: dict[int, _Recorder] = {}
        self._recording_errors: dict[int, str] = {}
        self._closed = False

    @classmethod
    def open(cls, url: str | None = None) -> Services:
        """Open (and migrate) the database at `url`, by default the user's. Raises `DatabaseError`."""
        return cls(Database.open(url))

    @property
    def host(self) -> EngineHost:
        """The engine host; the first call imports torch."""
        with self._lock:
            self._check_open()
            if self._host is None:
                self._host = (self._make_host or new_host)()
            return self._host

    @property
    def queue(self) -> RunQueue:
        """The queue that runs one workload after another on `host`."""
        with self._lock:
            self._check_open()
            if self._queue is None:
                from backend.experiments.run_queue import RunQueue

                self._queue = RunQueue(self.host)
            return self._queue

    def recording_error(self, run_id: int) -> str | None:
        """Why records of this run did not reach the database, once it has ended; None when all of them did."""
        return self._recording_errors.get(run_id)

    def close(self) -> None:
        """Cancel what runs, write what is left, free the device, close the database. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            queue, host = self._queue, self._host
        try:
            if queue is not None:
                queue.close()
            if host is not None:
                host.close()
        finally:
            for recorder in list(self._recorders.values()):
                recorder.close()
            self.database.close()

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("ServeLab is shutting down; no run can be started")

    def _add_recorder(self, run_id: int) -> _Recorder:
        recorder = self._recorders[run_id] = _Recorder(self.database, run_id, self._forget_recorder)
        return recorder

    def _forget_recorder(self, recorder: _Recorder) -> None:
        self._recorders.pop(recorder.run_id, None)
        if recorder.error:
            self._recording_errors[recorder.run_id] = str(recorder.error)


def start_run(services: Services, config: EngineConfig, workload: Workload, label: str | None = None) -> int:
    """Create the run's row, its recorder, and hand it to the queue. Returns the run id at once.

    Raises `ModelError` or `ConfigError` for what `check_run` finds, `DatabaseError` when the row cannot be written and
    `EngineError` while closing.
    """
    check_run(config, workload)
    queue = services.queue  # first: an engine that cannot be built must not leave a row behind
    run_id = services.repository.create(config.to_dict(), workload.to_dict(), label)
    recorder = services._add_recorder(run_id)
    try:
        queue.submit(run_id, config, workload, (recorder,))
    except BaseException as error:
        recorder.on_run_end(RunEnd("failed", end_time=time.perf_counter(), error=str(error)))
        raise
    return run_id


def start_kernel_run(services: Services, config: KernelLabConfig, label: str | None = None) -> int:
    """The same for the kernel lab: its results are stored as they come, and the engine is unloaded for it.

    Returns the run id at once. Raises `ConfigError` for what this machine cannot do, and as `start_run`.
    """
    from backend.experiments.kernel_lab import resolve_lab, run_lab

    queue = services.queue  # it prepares the surroundings in which torch is imported
    resolve_lab(config)
    run_id = services.repository.create(config.to_dict(), {}, label, kind="kernels")

    def store(result: Mapping[str, Any]) -> None:
        services.repository.add_kernel_result(run_id, result)

    _submit_task(services, queue, run_id, lambda sink, cancel: run_lab(config, sink, store, cancel))
    return run_id


def start_quantization_run(services: Services, config: QuantizationLabConfig, label: str | None = None) -> int:
    """The same for the quantization lab, and for a variant of it that is to be a model. Raises as `start_run`."""
    from backend.experiments.quantization_lab import check_lab, run_lab
    from backend.experiments.quantization_save import check_save, run_save

    queue = services.queue
    is_save = config.experiment == "save"
    (check_save if is_save else check_lab)(config)
    run_id = services.repository.create(config.to_dict(), {}, label, kind="quantization")

    def store(result: Mapping[str, Any]) -> None:
        services.repository.add_quantization_result(run_id, result)

    def task(sink: StatsSink, cancel: threading.Event) -> RunEnd:
        return run_save(config, sink, cancel) if is_save else run_lab(config, sink, store, cancel)

    _submit_task(services, queue, run_id, task)
    return run_id


def start_certificate_run(services: Services, config: CertificateConfig, label: str | None = None) -> int:
    """The same for a certificate of speculation, whose verdict is a chunk of the run's ledger. Raises as `start_run`."""
    from backend.experiments.certificate_lab import check_lab, run_lab

    queue = services.queue
    check_lab(config)
    check_engine(config.speculative_engine)
    run_id = services.repository.create(config.to_dict(), {}, label, kind="certificate")
    _submit_task(services, queue, run_id, lambda sink, cancel: run_lab(config, sink, cancel))
    return run_id


def stored_verdict(services: Services, run_id: int) -> Verdict | None:
    """That of a certificate's run, once it has ended. Raises `DatabaseError` where it is damaged."""
    from backend.experiments.certificate import CHUNK_KIND, read_verdict

    chunks = services.repository.chunks(run_id, CHUNK_KIND)
    return read_verdict(chunks[0][0]) if chunks else None


def _submit_task(services: Services, queue: RunQueue, run_id: int, task: Task) -> None:
    recorder = services._add_recorder(run_id)
    try:
        queue.submit_task(run_id, task, (recorder,))
    except BaseException as error:
        recorder.on_run_end(RunEnd("failed", end_time=time.perf_counter(), error=str(error)))
        raise


def check_run(config: EngineConfig, workload: Workload) -> None:
    """Find what would fail the run before its first request and is known without the model.

    Raises `ConfigError` for an impossible workload, and as `check_engine`.
    """
    from backend.workload.datasets import check_workload

    check_engine(config)
    check_workload(workload)


def check_engine(config: EngineConfig) -> None:
    """Find what would fail the load and is known before anything is fetched, as far as models, heads and speculation go.

    Raises `ModelError` for a model that is neither here nor can be pulled, and as `check_drafter`.
    """
    from backend.compat import configure_cpu_environment
    from backend.models.sources import is_pullable, resolve_source
    from backend.spec_decode.drafter_check import check_drafter

    if not is_pullable(config.model.name):
        resolve_source(config.model.name)
    configure_cpu_environment()  # a look at a target's weights imports torch
    check_drafter(config)


class _Recorder(RunRecorder):
    """Closes itself when its run ends: once the queue reports the end, the last row is on disk."""

    def __init__(self, database: Database, run_id: int, on_closed: Callable[[_Recorder], None]) -> None:
        super().__init__(database, run_id)
        self._on_closed = on_closed

    def on_run_end(self, end: RunEnd) -> None:
        super().on_run_end(end)
        self.close()
        self._on_closed(self)


def new_host() -> EngineHost:
    """An engine host without a model, in surroundings that were checked. Raises `ServeLabError`."""
    from backend.compat import check_kernels_package, configure_cpu_environment

    configure_cpu_environment()  # OpenMP reads its environment once, when torch is imported
    check_kernels_package()
    from backend.engine.engine_host import EngineHost

    return EngineHost()
