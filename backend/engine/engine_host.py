"""`EngineHost`: the one thread that owns the device, and the way in for everybody else.

Commands go in by queue and run between steps. Readers see immutable values that the thread has put in place.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, TypeVar

from backend.config import EngineConfig
from backend.engine.interpreter import clear_frames, freeze_objects, stepping
from backend.errors import EngineError, RequestError, ServeLabError
from backend.metrics.stats import MemoryUse, Phase, StatsSink
from backend.request import sample_ids
from backend.sampling_params import SamplingParams
from backend.workload.targets import StreamEvent

if TYPE_CHECKING:
    from backend.engine.loading import EngineInfo, LoadedEngine
    from backend.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

HostState = Literal["empty", "loading", "ready", "failed", "closed"]
EventListener = Callable[[StreamEvent], None]
T = TypeVar("T")


class EngineHost:
    """One engine at a time. Every method may be called from any thread but the host's own."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._loaded: LoadedEngine | None = None
        self._identity: object = None  # what was loaded: the config and the model's files
        self._listeners: dict[str, EventListener] = {}
        self._state: HostState = "empty"
        self._closing = False
        self._gate = threading.Lock()  # holds `close` and whoever puts a command apart
        self._thread = threading.Thread(target=self._loop, name="servelab-engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> HostState:
        return self._state

    @property
    def info(self) -> EngineInfo | None:
        loaded = self._loaded
        return loaded.info if loaded else None

    @property
    def tokenizer(self) -> Tokenizer:
        return self._require().tokenizer

    def load(self, config: EngineConfig, on_phase: Callable[[Phase], None] = lambda phase: None) -> EngineInfo:
        """Make `config` the loaded one and wait for it. The old engine is closed first; an equal config changes nothing.

        Raises `ServeLabError` of any kind that explains why it cannot be loaded; the host is then empty.
        """
        return self._call(lambda: self._load(config, on_phase))

    def submit(
        self,
        request_id: str,
        token_ids: list[int],
        sampling: SamplingParams,
        on_event: EventListener,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request; `on_event` is called on the host's thread and must return at once.

        With `sampling.n` above 1 it gets the events of that many requests, under the ids of `backend.request.sample_ids`.
        `priority` is for `scheduler.policy = "priority"`: lower runs first.

        Raises `RequestError` for one that could never be served, `EngineError` when no model is loaded.
        """
        arrival = time.perf_counter() if arrival_time is None else arrival_time
        self._require().engine.check_request(token_ids, sampling)
        self._put(lambda: self._add(request_id, token_ids, sampling, on_event, arrival, priority))

    def abort(self, request_id: str) -> None:
        """Ask for the end of a request, of one sample, or of all samples of a prompt; one that is over is ignored."""
        with suppress(EngineError):
            self._put(lambda: self._abort(request_id))

    def set_sink(self, sink: StatsSink | None) -> None:
        """Send step records to `sink` from the next step on; the old sink has all of its own when this returns."""
        self._call(lambda: self._set_sink(sink))

    def reset_peak_memory(self) -> None:
        self._call(lambda: self._require().engine.executor.reset_peak())

    def reset_prefix_cache(self) -> int:
        """Forget the KV that earlier requests left; how many tokens it was."""
        return self._call(lambda: self._require().engine.reset_prefix_cache())

    def num_cached_tokens(self) -> int:
        """Tokens whose KV earlier requests left."""
        return self._call(lambda: self._require().engine.num_cached_tokens)

    def execute(self, function: Callable[[], T]) -> T:
        """Run `function`, which may use the device, on the host's thread; wait for what it returns or raises.

        The host does nothing else until then: requests that are submitted meanwhile wait, and so does `close`.
        Raises `EngineError`, with nothing run, while requests are under way and once the host is closing.
        """
        return self._call(lambda: self._execute(function))

    def unload(self) -> None:
        """Close the loaded engine, if there is one, and give its device memory back. Raises as `execute`."""
        self._call(lambda: self._execute(lambda: self._unload("the model was unloaded")))

    def memory(self) -> MemoryUse:
        """What the engine holds now; zeros when nothing is loaded."""
        loaded = self._loaded
        return loaded.engine.executor.memory() if loaded else MemoryUse(0, 0, None, None)

    def close(self) -> None:
        """End all requests, free the device, end the thread. Safe to call twice."""
        with self._gate:
            self._closing = True
            self._commands.put(lambda: None)  # wakes the thread
        self._thread.join()

    def _require(self) -> LoadedEngine:
        loaded = self._loaded
        if loaded is None:
            raise EngineError(f"no model is loaded (the engine is {self._state})")
        return loaded

    def _call(self, function: Callable[[], T]) -> T:
        """Run `function` on the host's thread and hand back what it returns or raises."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._put(command)
        return future.result()

    def _put(self, command: Callable[[], None]) -> None:
        with self._gate:
            self._check_open()
            self._commands.put(command)

    def _check_open(self) -> None:
        if self._closing:
            raise EngineError("the engine is closed")

    # Everything below runs on the host's thread.

    def _loop(self) -> None:
        while not self._closing:
            self._run_commands(wait=True)
            if self._has_work():
                with stepping():
                    while self._has_work() and not self._closing:
                        self._step(self._require().engine.step)
                        self._run_commands()
        self._unload("the engine was closed")
        self._state = "closed"
        self._run_commands()  # nobody may be left waiting for an answer

    def _has_work(self) -> bool:
        loaded = self._loaded
        return loaded is not None and loaded.engine.has_unfinished_requests()

    def _run_commands(self, wait: bool = False) -> None:
        """All commands that are there; with `wait`, at least one."""
        while wait or not self._commands.empty():  # this thread alone takes from the queue
            command = self._commands.get()
            wait = False
            try:
                command()
            except Exception:
                logger.exception("a command failed on the engine's thread")

    def _step(self, step: Callable[[], list[StreamEvent]]) -> None:
        """Let the engine do `step` and deliver what it yields; an engine that fails is unloaded."""
        try:
            events = step()
        except Exception as error:
            logger.exception("the engine failed in a step")
            reason = str(error) if isinstance(error, ServeLabError) else f"{type(error).__name__}: {error}"
            del error  # its traceback holds the step's tensors
            self._unload(f"the engine failed in a step: {reason}")
            self._state = "failed"
            return
        listeners = self._listeners
        for event in events:
            if event.finish_reason is not None:
                self._deliver(event)
                continue
            listener = listeners[event.request_id]
            try:  # as `_deliver`, without its calls: nearly every event
                listener(event)
            except Exception:
                logger.exception("a listener failed on request %s", event.request_id)

    def _deliver(self, event: StreamEvent) -> None:
        if event.finish_reason is None:
            listener = self._listeners[event.request_id]
        else:
            listener = self._listeners.pop(event.request_id)
        _tell(listener, event)

    def _execute(self, function: Callable[[], T]) -> T:
        self._check_open()
        if self._listeners:
            raise EngineError(f"the engine is busy; requests under way: {len(self._listeners):,}")
        if self._loaded is not None:
            self._step(self._loaded.engine.drain)  # steps whose requests have all ended
        return function()

    def _set_sink(self, sink: StatsSink | None) -> None:
        self._step(self._require().engine.drain)
        self._require().engine.set_sink(sink)
        if sink is not None and not self._has_work():
            freeze_objects()  # a run begins; pages have brought in modules since the model was loaded

    def _load(self, config: EngineConfig, on_phase: Callable[[Phase], None]) -> EngineInfo:
        from backend.engine.loading import files_fingerprint, load_engine  # torch comes in here, and not before

        self._check_open()
        identity = (config, files_fingerprint(config))
        if self._loaded is not None and self._identity == identity:
            return self._loaded.info
        self._unload("another model was loaded")
        self._state = "loading"
        try:
            self._loaded = load_engine(config, on_phase)
        except BaseException as error:
            self._state = "empty"
            clear_frames(error)
            gc.collect()
            raise
        self._identity = identity
        self._state = "ready"
        freeze_objects()
        return self._loaded.info

    def _unload(self, reason: str) -> None:
        """Fail what is in flight and let go of the engine, its sink served to the end."""
        for request_id in list(self._listeners):
            event = StreamEvent(request_id, time.perf_counter(), (), "", finish_reason="error", error=reason)
            self._deliver(event)
        loaded, self._loaded, self._identity = self._loaded, None, None
        if loaded is not None:
            self._state = "empty"
            try:
                loaded.engine.set_sink(None)
                loaded.engine.executor.shutdown()
            except Exception:  # a device that has failed may fail again; what it held goes with the process
                logger.exception("the engine could not be shut down")
            del loaded
            gc.unfreeze()
            gc.collect()

    def _add(
        self,
        request_id: str,
        token_ids: list[int],
        sampling: SamplingParams,
        on_event: EventListener,
        arrival: float,
        priority: int,
    ) -> None:
        try:
            engine = self._require().engine
            engine.check_request(token_ids, sampling)  # again: another model may have been loaded since `submit`
            ids = engine.add_request(request_id, token_ids, sampling, arrival, priority)
        except (EngineError, RequestError) as error:
            for sample_id in sample_ids(request_id, sampling.n):
                event = StreamEvent(sample_id, time.perf_counter(), (), "", finish_reason="error", error=str(error))
                _tell(on_event, event)
            return
        self._listeners |= dict.fromkeys(ids, on_event)

    def _abort(self, request_id: str) -> None:
        for event in self._loaded.engine.abort_request(request_id) if self._loaded else ():
            self._deliver(event)


def _tell(listener: EventListener, event: StreamEvent) -> None:
    try:
        listener(event)
    except Exception:
        logger.exception("a listener failed on request %s", event.request_id)
