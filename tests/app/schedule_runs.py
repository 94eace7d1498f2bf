"""Runs with a schedule worth looking at, written by the real recorder from a real scheduler; the truth beside their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.services import Services
from backend.config import EngineConfig
from backend.metrics.ledger import LEDGER_KIND, StepLedger
from backend.metrics.stats import RequestStats, RunEnd, RunStart, RunStatus, StepStats
from backend.metrics.summary import summarize
from backend.workload.spec import Workload
from db.recorder import RunRecorder
from tests.metrics.traffic import Traffic, traffic

SLOTS = 6
ARRIVAL_SHIFT = 3.0  # of all times, so that the first arrival is not the run's start


def start_schedule_run(services: Services, settings: dict[str, Any] | None = None) -> tuple[int, RunRecorder]:
    """A run under way that has no step yet."""
    config = EngineConfig().with_overrides({"scheduler.max_num_seqs": SLOTS} | (settings or {}))
    run_id = services.repository.create(config.to_dict(), Workload().to_dict(), None)
    recorder = RunRecorder(services.database, run_id)
    recorder.on_run_start(
        RunStart(
            start_time=-ARRIVAL_SHIFT,
            resolved_config=config.resolve(device="cpu", max_model_len=100).to_dict(),
            environment={},
            load={"num_blocks": 30},
            notices=(),
            cache_state={"state": "cold", "num_cached_tokens": 0},
            num_requests=40,
        )
    )
    recorder.flush()
    return run_id, recorder


def feed_steps(recorder: RunRecorder, made: Traffic, first: int, end: int) -> None:
    """Steps `first` to `end` (exclusive) as one chunk of the ledger, and their records."""
    ledger = StepLedger()
    for step in made.steps[first:end]:
        columns = zip(*step.entries, strict=True) if step.entries else ((), (), ())
        ledger.append(step.step, *columns, step.events)
    chunk = ledger.flush()
    assert chunk is not None
    recorder.on_chunk(LEDGER_KIND, *chunk)
    for step in range(first, end):
        recorder.on_step(_stats(made, step))
    recorder.flush()


def feed_requests(recorder: RunRecorder, made: Traffic, until: float) -> list[RequestStats]:
    """The records of those that have ended by then."""
    ended = [_request(made, key) for key in made.arrivals if made.finishes[key] <= until]
    for request in ended:
        recorder.on_request_finished(request)
    recorder.flush()
    return ended


def end_run(recorder: RunRecorder, made: Traffic, requests: Sequence[RequestStats], status: RunStatus) -> None:
    recorder.on_run_end(RunEnd(status, made.times[-1][2], summarize(requests, slo_limits={}), None))
    recorder.close()


def add_schedule_run(
    services: Services, settings: dict[str, Any] | None = None, made: Traffic | None = None
) -> tuple[int, Traffic]:
    """A run that is over; its batching and policy are those of its settings."""
    settings = settings or {}
    made = made or traffic(
        batching=settings.get("scheduler.batching", "continuous"), policy=settings.get("scheduler.policy", "fcfs")
    )
    run_id, recorder = start_schedule_run(services, settings)
    feed_steps(recorder, made, 0, len(made.steps))
    requests = feed_requests(recorder, made, made.times[-1][2])
    end_run(recorder, made, requests, "finished")
    return run_id, made


def _stats(made: Traffic, step: int) -> StepStats:
    _, start, end = made.times[step]
    entries = made.steps[step].entries
    return StepStats(
        step=step,
        end_time=end,
        duration_ms=(end - start) * 1e3,
        schedule_ms=0.1,
        execute_ms=(end - start) * 1e3 - 0.2,
        process_ms=0.1,
        num_scheduled_requests=len(entries),
        num_prefill_tokens=sum(entry.num_scheduled_tokens for entry in entries if entry.kind != "decode"),
        num_decode_tokens=sum(entry.num_scheduled_tokens for entry in entries if entry.kind == "decode"),
        num_output_tokens=len(entries),
        num_running=len(entries),
        num_waiting=0,
        num_preempted=sum(event.kind == "preempt" for event in made.steps[step].events),
        num_referenced_blocks=1,
        num_evictable_blocks=0,
        num_free_blocks=29,
    )


def _request(made: Traffic, key: str) -> RequestStats:
    times = tuple(made.emissions[key])
    first = next(step for step, state in enumerate(made.states) if state.get(key) == "prefill")
    return RequestStats(
        request_id=key,
        index=int(key.partition("-")[2]),
        warmup=False,
        status="finished",
        finish_reason="length",
        error=None,
        arrival_time=made.arrivals[key],
        scheduled_time=made.times[first][1],
        emission_times=times,
        emission_tokens=(1,) * len(times),
        finish_time=made.finishes[key],
        num_prompt_tokens=made.prompt_lens[key],
        num_output_tokens=len(times),
        num_cached_tokens=0,
        num_preemptions=sum(
            event.kind == "preempt" and event.request_id == key for step in made.steps for event in step.events
        ),
        prompt=None,
        text=None,
        token_ids=None,
    )
