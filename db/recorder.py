"""Writes a run's records to the database without ever making the run wait.

The sink's methods only put records on a queue. A thread takes what has gathered every `COMMIT_INTERVAL_S` and stores it in
one transaction, so that a killed process loses less than a second of records; the end of a run is stored at once.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from sqlalchemy.exc import OperationalError

from backend.errors import DatabaseError
from backend.metrics.stats import Phase, RequestStats, RunEnd, RunStart, StepStats, TelemetrySample
from db.batch import Batch, BatchBuilder, Chunk, Record
from db.repository import RunRepository
from db.run_rows import Row
from db.session import Database

COMMIT_INTERVAL_S = 0.5
RETRY_FOR_S = 30.0  # how long a database that cannot be written is tried again before records are given up
RETRY_PAUSE_S = 0.5
_FILE_GONE = "the database file is gone"

_log = logging.getLogger(__name__)


class _FlushMarker(threading.Event):
    """Set when all that was put before it is stored or given up."""


class RunRecorder:
    """The `StatsSink` that stores one run. No method but `flush` and `close` waits, and none raises.

    A database that fails is tried again for `RETRY_FOR_S`; then the records at hand are dropped, `error` says why, the log has
    one line, and the run goes on. Later records and the run's end are still tried; an incomplete run says so in its notices.
    """

    def __init__(self, database: Database, run_id: int) -> None:
        """
        Args:
            database: must stay open until `close`.
            run_id: of a run made by `RunRepository.create` in this process.
        """
        self.run_id = run_id
        self.error: DatabaseError | None = None
        self._database = database
        self._repository = RunRepository(database)
        self._builder = BatchBuilder(run_id)
        self._queue: SimpleQueue[Record | _FlushMarker] = SimpleQueue()
        # The writer looks at the queue when this is set or the interval is over, not at every record: waking it for each
        # one would make it contend with the step loop for the interpreter.
        self._wake = threading.Event()
        self._closing = False
        self._finished = False
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def on_run_start(self, start: RunStart) -> None:
        self._put(start)

    def on_phase(self, phase: Phase) -> None:
        self._put(phase)

    def on_step(self, stats: StepStats) -> None:
        self._put(stats)

    def on_request_finished(self, stats: RequestStats) -> None:
        self._put(stats)

    def on_chunk(self, kind: str, encode: Callable[[], bytes], first_step: int, last_step: int) -> None:
        self._put(Chunk(kind, encode, first_step, last_step))

    def on_sample(self, sample: TelemetrySample) -> None:
        self._put(sample)

    def on_run_end(self, end: RunEnd) -> None:
        """Store what is left and the run's end at once; records that come later are ignored."""
        self._put(end)
        self._wake.set()

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until every record put so far is stored or given up. Returns whether that came in time."""
        marker = _FlushMarker()
        self._put(marker)
        self._wake.set()
        deadline = time.monotonic() + timeout
        while not (marker.wait(0.01) or self._finished):
            if time.monotonic() > deadline:
                return False
        return True

    def close(self, timeout: float = 60.0) -> None:
        """Store what is left and end the writer. A run without an end keeps its status. Safe to call twice."""
        self._closing = True
        self._wake.set()
        if self._thread is None:
            return
        self._thread.join(timeout)
        if not self._finished and self.error is None:
            self.error = DatabaseError(f"run #{self.run_id}: its last records were not stored within {timeout:g} s")

    def _put(self, record: Record | _FlushMarker) -> None:
        self._queue.put(record)
        if self._thread is None:
            self._start_writer()

    def _start_writer(self) -> None:
        with self._start_lock:
            if self._thread is None:
                atexit.register(
                    self.close
                )  # the interpreter would otherwise cut a daemon thread off with records at hand
                self._thread = threading.Thread(target=self._write, name=f"recorder-{self.run_id}", daemon=True)
                self._thread.start()

    # What follows runs in the writer thread.

    def _write(self) -> None:
        unsaved: Row = {}  # changes of the run's own row that could not be stored yet
        closing = False
        while not (closing or self._builder.ended):
            self._wake.wait(COMMIT_INTERVAL_S)
            self._wake.clear()
            closing = self._closing  # read before the queue is: what was put before `close` is still stored
            batch = Batch(unsaved)
            markers = self._fill(batch)
            unsaved = self._save(batch)
            for marker in markers:
                marker.set()
        if self._database.is_file_gone():  # SQLite goes on writing to a deleted file, and all of it succeeds
            self._remember(_FILE_GONE, Batch({}))
        self._finished = True
        atexit.unregister(self.close)

    def _fill(self, batch: Batch) -> list[_FlushMarker]:
        """Add all that is on the queue now to `batch`."""
        markers = []
        for record in self._queued():
            if isinstance(record, _FlushMarker):
                markers.append(record)
                continue
            try:
                self._builder.add(batch, record)
            except Exception as error:  # whatever is wrong with one record, the others are kept
                self._remember(f"a {type(record).__name__} was not understood: {error!r}", batch)
        return markers

    def _queued(self) -> Iterator[Record | _FlushMarker]:
        while not self._builder.ended:
            try:
                yield self._queue.get_nowait()
            except Empty:
                return

    def _save(self, batch: Batch) -> Row:
        """Store `batch`. Returns the changes of the run's row that are still to be stored; rows are tried only here."""
        if not batch or self._store(batch):
            return {}
        if self._builder.ended and self._store(Batch(batch.changes)):  # the rows may be what could not be stored
            return {}
        return batch.changes

    def _store(self, batch: Batch) -> bool:
        """Store in one transaction, with patience until the first time it is in vain. Returns whether it was stored."""
        deadline = time.monotonic() + (RETRY_FOR_S if self.error is None else 0.0)
        while True:
            try:
                self._repository.record(self.run_id, batch.changes, batch.rows)
                return True
            except Exception as error:
                gone = self._database.is_file_gone()
                if not gone and isinstance(error.__cause__, OperationalError) and time.monotonic() < deadline:
                    time.sleep(RETRY_PAUSE_S)
                    continue
                self._remember(_FILE_GONE if gone else str(error), batch)
                return False

    def _remember(self, message: str, batch: Batch) -> None:
        """Keep and log the first failure only: a full disk fails at every commit."""
        if self.error is None:
            self.error = DatabaseError(f"run #{self.run_id} is not fully recorded: {message}")
            self._builder.add_notice(batch, f"Not all records of this run were stored: {message}")
            _log.error("%s", self.error)
