"""Runs one after another on a host that only pretends: order, phases, cancelling, and what goes wrong on the way."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from backend.config import EngineConfig
from backend.errors import CapacityError, EngineError, ModelError, ServeLabError
from backend.experiments import run_queue
from backend.experiments.run_queue import RunQueue
from backend.metrics.stats import (
    MemoryUse,
    Phase,
    RequestStats,
    RunEnd,
    RunStart,
    StatsSink,
    StepStats,
    TelemetrySample,
    summary_to_dict,
)
from backend.sampling_params import SamplingParams
from backend.workload.spec import Workload
from backend.workload.targets import Prompt, StreamEvent
from tests.waiting import PATIENCE_S, until

CONFIG = EngineConfig()


@dataclass
class Info:
    resolved_config: EngineConfig
    model: dict[str, Any] = field(default_factory=lambda: {"name": "fake", "vocab_size": 512})
    load: dict[str, Any] = field(default_factory=lambda: {"weights_bytes": 300})
    notices: tuple[str, ...] = ("a notice",)


class Host:
    """Serves requests on a thread, one token per 2 ms step; `hold` keeps the requests waiting."""

    def __init__(self) -> None:
        self.state = "ready"
        self.loaded: list[EngineConfig] = []
        self.load_error: Exception | None = None
        self.loading = threading.Event()
        self.may_load = threading.Event()
        self.may_load.set()
        self.hold = threading.Event()
        self.die_at_step: int | None = None
        self.cached_tokens = 0
        self._lock = threading.Lock()
        self._sink: StatsSink | None = None
        self._requests: dict[str, list[Any]] = {}
        self._steps = 0
        self._closing = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def load(self, config: EngineConfig, on_phase: Callable[[Phase], None]) -> Info:
        self.loading.set()
        while not self.may_load.wait(0.01):
            on_phase(Phase("loading", 1, 2, "MiB"))
        if self.load_error is not None:
            raise self.load_error
        if not self.loaded or self.loaded[-1] != config:
            self.loaded.append(config)
        return Info(config.resolve(device="cpu", max_model_len=128))

    def set_sink(self, sink: StatsSink | None) -> None:
        with self._lock:
            if self.state != "ready":
                raise EngineError(f"no model is loaded (the engine is {self.state})")
            if self._sink is not None:
                self._sink.on_chunk("steps", lambda: b"rest", 0, self._steps)
            self._sink, self._steps = sink, 0

    def memory(self) -> MemoryUse:
        return MemoryUse(300, 200, 1000, 5000)

    def reset_prefix_cache(self) -> int:
        dropped, self.cached_tokens = self.cached_tokens, 0
        return dropped

    def num_cached_tokens(self) -> int:
        return self.cached_tokens

    def reset_peak_memory(self) -> None: ...
    def unload(self) -> None: ...

    def execute(self, function: Callable[[], RunEnd]) -> RunEnd:
        return function()

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        on_event: Callable[[StreamEvent], None],
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        with self._lock:
            if self.state != "ready":
                raise EngineError(f"no model is loaded (the engine is {self.state})")
            self._requests[request_id] = [sampling.max_tokens, on_event]

    def abort(self, request_id: str) -> None:
        with self._lock:
            found = self._requests.pop(request_id, None)
        if found:
            found[1](StreamEvent(request_id, time.perf_counter(), (), "", "abort"))

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def _loop(self) -> None:
        while not self._closing:
            time.sleep(0.002)
            with self._lock:
                if self._requests and not self.hold.is_set() and self.state == "ready":
                    self._step()

    def _step(self) -> None:
        started = time.perf_counter()
        if self.die_at_step == self._steps:
            for request_id, (_, on_event) in self._requests.items():
                on_event(StreamEvent(request_id, time.perf_counter(), (), "", "error", "the engine failed in a step"))
            self._requests.clear()
            self._sink = None
            self.state = "failed"
            return
        now = time.perf_counter()
        running = len(self._requests)
        if self._sink is not None:
            ms = (now - started) * 1e3
            self._sink.on_step(
                StepStats(self._steps, now, ms, 0, ms, 0, running, 0, running, running, running, 0, 0, running, 0, 16)
            )
        self._steps += 1
        for request_id, request in list(self._requests.items()):
            request[0] -= 1
            if request[0] == 0:
                del self._requests[request_id]
            request[1](
                StreamEvent(request_id, now, (1,), "x", "length" if request[0] == 0 else None, None, 7, 0, 0, started)
            )


class Sink:
    """Remembers all calls in order; raises in those named."""

    def __init__(self, *broken: str) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.broken = broken

    def of(self, name: str) -> list[Any]:
        return [value for call, value in self.calls if call == name]

    def _note(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name in self.broken:
            raise OSError("disk full")

    def on_run_start(self, start: RunStart) -> None:
        self._note("start", start)

    def on_phase(self, phase: Phase) -> None:
        self._note("phase", phase)

    def on_step(self, stats: StepStats) -> None:
        self._note("step", stats)

    def on_request_finished(self, stats: RequestStats) -> None:
        self._note("request", stats)

    def on_chunk(self, kind: str, encode: Callable[[], bytes], first_step: int, last_step: int) -> None:
        self._note("chunk", kind)

    def on_sample(self, sample: TelemetrySample) -> None:
        self._note("sample", sample)

    def on_run_end(self, end: RunEnd) -> None:
        self._note("end", end)


class HoldsRequests(Sink):
    """Keeps the host from the measured requests until `let_go`, when all of them are there: how many steps they take is known."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def on_phase(self, phase: Phase) -> None:
        super().on_phase(phase)
        if (phase.name, phase.done) == ("running", 0):
            self._host.hold.set()

    def let_go(self, num_requests: int) -> None:
        until(lambda: self._host.hold.is_set() and self._host.in_flight == num_requests)
        self._host.hold.clear()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.hold.clear()
    host.close()


@pytest.fixture
def queue(host: Host) -> Iterator[RunQueue]:
    queue = RunQueue(host, ensure_model=lambda name, on_progress: None, make_target=lambda host: host)
    yield queue
    host.may_load.set()
    queue.close()


def workload(count: int = 4, output_len: Any = 5, **changes: Any) -> Workload:
    source = {"kind": "prompts", "prompts": ["hello"] * count}
    return Workload.from_dict({"source": source, "output_len": output_len, **changes})


def phases(sink: Sink) -> list[str]:
    """Names of the phases, each once per stretch."""
    names = [phase.name for phase in sink.of("phase")]
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


def test_a_run_from_start_to_summary(host: Host, queue: RunQueue, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_queue, "SAMPLE_INTERVAL_S", 3600.0)  # one at each end, however long it takes
    sink = HoldsRequests(host)
    queue.submit(3, CONFIG, workload(slo={"preset": "chat"}), [sink])
    sink.let_go(4)
    end = queue.wait(3, PATIENCE_S)
    assert end is not None
    assert (end.status, end.error) == ("finished", None)
    assert phases(sink) == ["pulling", "loading", "warming up", "running", "writing"]
    names = [name for name, _ in sink.calls]
    assert names[-1] == "end"
    assert names.count("end") == names.count("start") == 1
    assert sink.of("end") == [end]
    (start,) = sink.of("start")
    assert (start.num_requests, start.notices) == (4, ("a notice",))
    assert start.cache_state == {"state": "cold", "num_cached_tokens": 0}
    assert start.resolved_config["model"]["max_model_len"] == 128
    assert start.load["weights_bytes"] == 300
    assert start.load["model"]["name"] == "fake"
    assert len(start.load["prompts_sha256"]) == 64
    assert start.environment["cpu_threads"] == start.resolved_config["kernels"]["cpu_threads"]
    json.dumps([start.load, start.environment, start.resolved_config])
    requests = sink.of("request")
    assert [request.warmup for request in requests] == [True] + [False] * 4
    assert {request.request_id.split("-")[0] for request in requests} == {"run3"}
    first = names.index("start")
    assert not {"step", "request", "sample", "chunk"} & set(names[:first])
    assert all(value.start_time >= start.start_time for value in sink.of("step"))
    assert all(request.arrival_time >= start.start_time for request in requests)
    assert len(sink.of("step")) == 10  # 5 of the warm-up
    assert sink.of("chunk") == ["steps"]
    assert len(sink.of("sample")) == 2
    summary = end.summary
    assert summary is not None
    json.dumps(summary_to_dict(summary), allow_nan=False)
    assert (summary.num_requests, summary.num_failed, summary.output_tokens) == (4, 0, 20)
    assert summary.kv_cache_usage_max == pytest.approx(4 / 20)
    assert summary.peak_memory_bytes == 5000
    assert summary.goodput_req_s == summary.request_throughput_req_s
    live = queue.live()
    assert live is not None
    assert (live.run_id, live.status, live.summary, live.num_finished) == (3, "finished", summary, 4)
    assert live.output_tokens == 20
    assert live.elapsed_s > end.end_time - start.start_time


def test_runs_take_turns_and_share_a_loaded_model(host: Host, queue: RunQueue):
    host.hold.set()
    sinks = [Sink(), Sink(), Sink()]
    for run_id, sink in enumerate(sinks):
        queue.submit(run_id, CONFIG, workload(), [sink])
    until(lambda: host.in_flight)
    assert queue.queued() == (1, 2)
    waiting = queue.live(2)
    assert waiting is not None
    assert (waiting.status, waiting.phase, waiting.num_requests) == ("queued", Phase("queued"), 4)
    active = queue.live()
    assert active is not None
    assert (active.run_id, active.status, active.phase.name) == (0, "running", "warming up")
    assert queue.wait(0, timeout=0.01) is None
    host.hold.clear()
    ends = [queue.wait(run_id, PATIENCE_S) for run_id in range(3)]
    assert [end.status for end in ends if end] == ["finished"] * 3
    assert ends[0].end_time <= sinks[1].of("start")[0].start_time  # type: ignore[union-attr]
    assert len(host.loaded) == 1
    assert queue.queued() == ()
    assert queue.live(0) is None
    assert queue.wait(99) is None


@pytest.mark.parametrize(
    ("reset", "state"),
    [(True, {"state": "cold", "num_cached_tokens": 0}), (False, {"state": "warm", "num_cached_tokens": 640})],
)
def test_a_run_says_what_it_found_in_the_cache(host: Host, queue: RunQueue, reset: bool, state: dict[str, Any]):
    host.cached_tokens, sink = 640, Sink()
    queue.submit(1, EngineConfig(), workload(1, reset_prefix_cache=reset), [sink])
    assert queue.wait(1, PATIENCE_S)
    assert sink.of("start")[0].cache_state == state


@pytest.mark.parametrize(("warmup", "reset", "expected"), [(2, True, 2), (0, True, 1), (2, False, 0)])
def test_the_cache_is_emptied_again_behind_the_warm_up(
    host: Host, queue: RunQueue, monkeypatch: pytest.MonkeyPatch, warmup: int, reset: bool, expected: int
):
    """Which asks the first prompts of the workload: they are not to be found, in a run that says that nothing was."""
    seen: list[str] = []  # resets, and requests as they are sent
    submit = host.submit

    def note_and_submit(request_id: str, *arguments: Any, **more: Any) -> None:
        seen.append("warmup" if "warmup" in request_id else "request")
        submit(request_id, *arguments, **more)

    monkeypatch.setattr(host, "reset_prefix_cache", lambda: seen.append("reset"))
    monkeypatch.setattr(host, "submit", note_and_submit)
    queue.submit(1, CONFIG, workload(3, warmup_requests=warmup, reset_prefix_cache=reset), [])
    assert queue.wait(1, PATIENCE_S)
    before = ["reset", *["warmup"] * warmup, "reset"][: 1 + warmup + (warmup > 0)] if reset else ["warmup"] * warmup
    assert seen == [*before, *["request"] * 3]
    assert seen.count("reset") == expected


def test_what_the_context_cuts_is_said_and_not_counted(host: Host, queue: RunQueue):
    """64 + 5 tokens with the first turn, 32 + 5 more with the second; the third would pass the 128 of the context."""
    sink = Sink()
    spec = Workload.from_dict({"source": {"kind": "conversations", "num_conversations": 3}, "output_len": 5})
    queue.submit(1, EngineConfig(), spec, [sink])
    end = queue.wait(1, PATIENCE_S)
    assert end is not None
    assert (end.status, end.error) == ("finished", None)
    (start,) = sink.of("start")
    assert start.num_requests == 6
    assert start.notices == (
        "a notice",
        "3 of 3 conversations end before the turn that would pass the context of 128 tokens",
    )
    asked = sorted(request.request_id for request in sink.of("request") if not request.warmup)
    assert asked == [f"run1-c{conversation}-t{number}" for conversation in range(3) for number in range(2)]


def test_a_second_submit_of_a_run_is_refused(host: Host, queue: RunQueue):
    host.hold.set()
    sink = Sink()
    queue.submit(1, CONFIG, workload(), [sink])
    until(lambda: host.in_flight)
    with pytest.raises(EngineError, match="run #1 was already submitted"):
        queue.submit(1, CONFIG, workload(), [sink])
    host.hold.clear()
    assert queue.wait(1, PATIENCE_S)
    with pytest.raises(EngineError, match="run #1 was already submitted"):
        queue.submit(1, CONFIG, workload(), [sink])
    assert len(sink.of("end")) == len(sink.of("start")) == 1


def test_cancel_of_a_queued_run_loads_nothing(host: Host, queue: RunQueue):
    host.hold.set()
    first, second = Sink(), Sink()
    queue.submit(1, CONFIG, workload(), [first])
    until(lambda: host.in_flight)
    queue.submit(2, CONFIG.with_overrides({"cache.block_size": 32}), workload(), [second])
    assert queue.cancel(2)
    end = queue.wait(2, timeout=0)
    assert end is not None
    assert (end.status, end.summary) == ("cancelled", None)
    assert [name for name, _ in second.calls] == ["end"]
    host.hold.clear()
    assert queue.wait(1, PATIENCE_S)
    assert len(host.loaded) == 1
    assert not queue.cancel(2)
    assert not queue.cancel(1)
    assert not queue.cancel(77)


def test_cancel_of_a_running_run_keeps_what_was_measured(host: Host, queue: RunQueue):
    class HoldsAfterSix(Sink):
        def on_request_finished(self, stats: RequestStats) -> None:
            super().on_request_finished(stats)
            if len(self.of("request")) == 6:
                host.hold.set()

    sink = HoldsAfterSix()
    arrivals = {"kind": "closed_loop", "concurrency": 2}
    queue.submit(1, CONFIG, workload(1000, arrivals=arrivals), [sink])
    until(lambda: host.hold.is_set())
    assert queue.cancel(1)
    end = queue.wait(1, PATIENCE_S)
    assert end is not None
    assert end.status == "cancelled"
    assert end.summary is not None
    assert 4 <= end.summary.num_requests < 1000
    assert end.summary.ttft_ms.count >= 4
    assert host.in_flight == 0
    assert len(sink.of("end")) == 1
    host.hold.clear()
    queue.submit(2, CONFIG, workload(), [Sink()])  # the engine is still usable
    again = queue.wait(2, PATIENCE_S)
    assert again is not None
    assert again.status == "finished"


@pytest.mark.parametrize("phase", ["pulling", "loading"])
def test_cancel_before_the_engine_is_ready(host: Host, phase: str):
    pulling = threading.Event()

    def ensure_model(name: str, on_progress: Callable[[str, float, float, str], None]) -> None:
        assert name == "smollm2-135m"
        while phase == "pulling":
            on_progress("downloading", 34, 98, "bytes")
            pulling.set()
            time.sleep(0.005)

    if phase == "loading":
        host.may_load.clear()
    queue = RunQueue(host, ensure_model=ensure_model, make_target=lambda host: host)
    sink = Sink()
    queue.submit(1, CONFIG, workload(), [sink])
    assert (pulling if phase == "pulling" else host.loading).wait(PATIENCE_S)
    until(lambda: sink.of("phase")[-1].done)
    live = queue.live()
    assert live is not None
    assert (live.status, live.phase.name) == ("loading", phase)
    assert queue.cancel(1)
    end = queue.wait(1, PATIENCE_S)
    queue.close()
    assert end is not None
    assert (end.status, end.summary, end.error) == ("cancelled", None, None)
    assert sink.of("start") == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CapacityError("the weights need 16 GiB, the card has 8"), "the weights need 16 GiB, the card has 8"),
        (KeyError("layer"), "KeyError: 'layer'"),
    ],
)
def test_a_model_that_cannot_be_loaded(host: Host, queue: RunQueue, error: Exception, message: str):
    host.load_error = error
    sink = Sink()
    queue.submit(1, CONFIG, workload(), [sink])
    end = queue.wait(1, PATIENCE_S)
    assert end is not None
    assert (end.status, end.error, end.summary) == ("failed", message, None)
    assert sink.of("end") == [end]
    host.load_error = None
    queue.submit(2, CONFIG, workload(), [])
    again = queue.wait(2, PATIENCE_S)
    assert again is not None
    assert again.status == "finished"


def test_a_model_that_cannot_be_pulled(host: Host):
    def ensure_model(name: str, on_progress: Any) -> None:
        raise ModelError(f"{name} cannot be downloaded")

    queue = RunQueue(host, ensure_model=ensure_model, make_target=lambda host: host)
    queue.submit(1, CONFIG, workload(), [])
    end = queue.wait(1, PATIENCE_S)
    queue.close()
    assert end is not None
    assert (end.status, end.error) == ("failed", "smollm2-135m cannot be downloaded")
    assert host.loaded == []


def test_a_bad_prompts_file_fails_before_anything_is_loaded(host: Host, queue: RunQueue):
    queue.submit(1, CONFIG, Workload.from_dict({"source": {"kind": "prompts", "file": "/nowhere.jsonl"}}), [])
    end = queue.wait(1, PATIENCE_S)
    assert end is not None
    assert end.status == "failed"
    assert end.error is not None
    assert "/nowhere.jsonl" in end.error
    assert host.loaded == []


def test_an_engine_that_fails_on_the_way_fails_the_run(host: Host, queue: RunQueue):
    """Some requests had finished: their figures stay, and the run still counts as failed."""
    host.die_at_step = 30
    arrivals = {"kind": "closed_loop", "concurrency": 2}
    queue.submit(1, CONFIG, workload(1000, arrivals=arrivals), [])
    end = queue.wait(1, PATIENCE_S)
    assert end is not None
    assert end.status == "failed"
    assert end.error is not None
    assert end.summary is not None
    assert end.summary.ttft_ms.count >= 4
    assert end.summary.num_failed >= 2


def test_an_engine_that_fails_with_everything_in_flight(host: Host, queue: RunQueue):
    host.die_at_step = 7
    sink = HoldsRequests(host)
    queue.submit(1, CONFIG, workload(4, output_len={"kind": "uniform", "min": 1, "max": 9}), [sink])
    sink.let_go(4)
    end = queue.wait(1, PATIENCE_S)
    assert end is not None
    assert end.status == "failed"
    assert end.error is not None
    assert "the engine failed in a step" in end.error


def test_a_broken_sink_hurts_neither_the_run_nor_the_others(
    host: Host, queue: RunQueue, caplog: pytest.LogCaptureFixture
):
    broken, sound = Sink("start", "phase", "step", "request", "sample", "chunk", "end"), Sink()
    with caplog.at_level(logging.ERROR):
        queue.submit(1, CONFIG, workload(), [broken, sound])
        end = queue.wait(1, PATIENCE_S)
    assert end is not None
    assert end.status == "finished"
    # Steps, samples and requests come from threads of their own: each sink gets all of them, in whatever order.
    assert Counter(name for name, _ in broken.calls) == Counter(name for name, _ in sound.calls)
    assert len(caplog.records) == 7


def test_close_cancels_everything(host: Host):
    queue = RunQueue(host, ensure_model=lambda name, on_progress: None, make_target=lambda host: host)
    host.hold.set()
    sinks = [Sink(), Sink(), Sink()]
    for run_id, sink in enumerate(sinks):
        queue.submit(run_id, CONFIG, workload(), [sink])
    until(lambda: host.in_flight)
    queue.close()
    queue.close()
    assert [[end.status for end in sink.of("end")] for sink in sinks] == [["cancelled"]] * 3
    assert host.in_flight == 0
    with pytest.raises(ServeLabError, match="shutting down"):
        queue.submit(9, CONFIG, workload(), [])


def test_submitting_from_many_threads_at_once(host: Host, queue: RunQueue):
    sinks = {run_id: Sink() for run_id in range(8)}
    refused: list[int] = []

    def submit(run_id: int) -> None:
        try:
            queue.submit(run_id, CONFIG, workload(1, output_len=1, warmup_requests=0), [sinks[run_id]])
        except EngineError:
            refused.append(run_id)

    threads = [threading.Thread(target=submit, args=(run_id,)) for run_id in (*range(8), *range(8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(refused) == list(range(8))
    ends = [queue.wait(run_id, PATIENCE_S) for run_id in range(8)]
    assert [end.status for end in ends if end] == ["finished"] * 8
    assert [len(sink.of("start")) for sink in sinks.values()] == [1] * 8
