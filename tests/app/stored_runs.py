"""Plausible runs for the pages to show, written by the real recorder, and services that need no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.services import Services
from backend.config import EngineConfig
from backend.metrics.live import LiveRun, LiveSnapshot
from backend.metrics.stats import Phase, RequestStats, RunEnd, RunStart, RunStatus, StatsSink, StepStats
from backend.metrics.summary import summarize
from backend.workload.spec import Workload
from db.recorder import RunRecorder

NUM_REQUESTS = 4
TOKENS = 6
NASTY = "=1+1 <script>alert(1)</script> *bold* $x$ :red[y]"


def feed(
    sink: StatsSink, config: EngineConfig, step_s: float = 0.05, status: RunStatus = "finished", num_failed: int = 0
) -> None:
    """A whole run: four requests prefilled in one step, then decoded together; the last `num_failed` fail at the end."""
    end_time = feed_start(sink, config, step_s)
    requests = [_request(index, end_time, step_s) for index in range(NUM_REQUESTS)]
    for index in range(NUM_REQUESTS - num_failed, NUM_REQUESTS):
        requests[index] = replace(requests[index], status="failed", finish_reason="error", error="boom")
    for request in requests:
        sink.on_request_finished(request)
    sink.on_run_end(RunEnd(status, end_time, summarize(requests, slo_limits={}, kv_cache_usage_max=0.2)))


def feed_start(sink: StatsSink, config: EngineConfig, step_s: float = 0.05) -> float:
    """The same run up to the moment before its requests end. Returns the clock then."""
    resolved = config.resolve(device="cuda" if config.kernels.backend == "triton" else "cpu", max_model_len=8192)
    sink.on_phase(Phase("loading"))
    sink.on_run_start(
        RunStart(
            start_time=100.0,
            resolved_config=resolved.to_dict(),
            environment={"host": "lab", "cpu": "CPU", "gpu": None, "ram_bytes": 2**34, "versions": {"torch": "2"}},
            load={"load_seconds": 1.5, "weights_bytes": 540_000_000, "num_blocks": 100},
            notices=("the KV cache holds 1,600 tokens",),
            cache_state={"state": "cold", "num_cached_tokens": 0},
            num_requests=NUM_REQUESTS,
        )
    )
    sink.on_phase(Phase("running", 0, NUM_REQUESTS))
    for step in range(TOKENS):
        sink.on_step(_step(step, 100.0 + (step + 1) * step_s, step_s))
    return 100.0 + TOKENS * step_s


def add_run(
    services: Services,
    settings: Mapping[str, Any] | None = None,
    *,
    label: str | None = None,
    step_s: float = 0.05,
    status: RunStatus = "finished",
    error: str | None = None,
    num_failed: int = 0,
) -> int:
    """Store a run that ended with `status`; one that failed did so before its first request."""
    config = EngineConfig().with_overrides(settings or {})
    run_id = services.repository.create(config.to_dict(), Workload().to_dict(), label)
    recorder = RunRecorder(services.database, run_id)
    if status == "failed":
        recorder.on_run_end(RunEnd(status, 100.0, None, error))
    else:
        feed(recorder, config, step_s, status, num_failed)
    recorder.close()
    return run_id


class FakeHost:
    """An engine host without an engine."""

    state = "empty"
    info = None

    def close(self) -> None: ...


class FakeQueue:
    """A run queue that runs nothing: tests put the run they want to see in `live_run`."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, EngineConfig, Workload]] = []
        self.tasks: list[tuple[int, Any]] = []
        self.cancelled: list[int] = []
        self.live_run: LiveRun | None = None

    def submit(self, run_id: int, config: EngineConfig, workload: Workload, sinks: Sequence[StatsSink]) -> None:
        self.submitted.append((run_id, config, workload))

    def submit_task(self, run_id: int, task: Any, sinks: Sequence[StatsSink]) -> None:
        self.tasks.append((run_id, task))

    def cancel(self, run_id: int) -> bool:
        self.cancelled.append(run_id)
        return True

    def live(self, run_id: int | None = None) -> LiveSnapshot | None:
        run = self.live_run
        return run.snapshot() if run is not None and run_id in (None, run.run_id) else None

    def queued(self) -> tuple[int, ...]:
        return tuple(run_id for run_id, _, _ in self.submitted)

    def close(self) -> None: ...


class FakeServices(Services):
    """Real database, no engine."""

    fake_host = FakeHost()
    fake_queue: FakeQueue

    @property
    def host(self) -> Any:
        return self.fake_host

    @property
    def queue(self) -> Any:
        return self.fake_queue


def _step(step: int, end_time: float, step_s: float) -> StepStats:
    prefill = 40 if step == 0 else 0
    return StepStats(
        step=step,
        end_time=end_time,
        duration_ms=step_s * 1e3,
        schedule_ms=0.1,
        execute_ms=step_s * 1e3 - 0.2,
        process_ms=0.1,
        num_scheduled_requests=NUM_REQUESTS,
        num_prefill_tokens=prefill,
        num_decode_tokens=0 if prefill else NUM_REQUESTS,
        num_output_tokens=NUM_REQUESTS,
        num_running=NUM_REQUESTS,
        num_waiting=0,
        num_preempted=0,
        num_referenced_blocks=8,
        num_evictable_blocks=0,
        num_free_blocks=92,
    )


def _request(index: int, end_time: float, step_s: float) -> RequestStats:
    times = tuple(100.0 + (step + 1) * step_s for step in range(TOKENS))
    return RequestStats(
        request_id=f"r{index}",
        index=index,
        warmup=False,
        status="finished",
        finish_reason="length",
        error=None,
        arrival_time=100.0,
        scheduled_time=100.0,
        emission_times=times,
        emission_tokens=(1,) * TOKENS,
        finish_time=end_time,
        num_prompt_tokens=10,
        num_output_tokens=TOKENS,
        num_cached_tokens=0,
        num_preemptions=0,
        prompt=f"prompt {index} {NASTY}",
        text=f"text {index} {NASTY}",
        token_ids=tuple(range(TOKENS)),
    )
