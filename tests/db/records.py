"""Records for the database's tests, and programs that record from a process of their own.

`python -m tests.db.records PROGRAM URL ...` runs one of `PROGRAMS`.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.metrics.stats import (
    Distribution,
    RequestStats,
    RunStart,
    RunSummary,
    StepStats,
    TelemetrySample,
)

ROOT = Path(__file__).resolve().parents[2]

CONFIG: dict[str, Any] = {"model": {"name": "tiny", "dtype": "auto"}, "cache": {"block_size": 16}}
WORKLOAD: dict[str, Any] = {"source": {"kind": "prompts", "prompts": ["a", "b"]}, "seed": 0}


def make_start(start_time: float = 100.0) -> RunStart:
    return RunStart(
        start_time=start_time,
        resolved_config=CONFIG | {"cache": {"block_size": 16, "num_blocks": 64}},
        environment={"host": "lab", "versions": {"torch": "2.13.0"}},
        load={"load_seconds": 1.5, "num_blocks": 64},
        notices=("The context was cut to 1,024 tokens.",),
        cache_state={"state": "cold", "num_cached_tokens": 0},
        num_requests=2,
    )


def make_step(step: int, start_time: float = 100.0, **changes: Any) -> StepStats:
    stats = StepStats(
        step=step,
        end_time=start_time + 0.5 + step * 0.25,
        duration_ms=20.0,
        schedule_ms=0.5,
        execute_ms=19.0,
        process_ms=0.5,
        num_scheduled_requests=4,
        num_prefill_tokens=12 if step == 0 else 0,
        num_decode_tokens=4,
        num_output_tokens=4,
        num_running=4,
        num_waiting=1,
        num_preempted=0,
        num_referenced_blocks=10,
        num_evictable_blocks=6,
        num_free_blocks=48,
    )
    return replace(stats, **changes)


def make_request(index: int, start_time: float = 100.0, **changes: Any) -> RequestStats:
    """Arrives 1 s after the start, waits 0.5 s, delivers 1, 2 and 1 tokens at 2.0, 2.1 and 2.4 s."""
    stats = RequestStats(
        request_id=f"r{index}",
        index=index,
        warmup=False,
        status="finished",
        finish_reason="length",
        error=None,
        arrival_time=start_time + 1.0,
        scheduled_time=start_time + 1.5,
        emission_times=(start_time + 2.0, start_time + 2.1, start_time + 2.4),
        emission_tokens=(1, 2, 1),
        finish_time=start_time + 2.5,
        num_prompt_tokens=7,
        num_output_tokens=4,
        num_cached_tokens=0,
        num_preemptions=0,
        prompt="Why is the sky blue?",
        text=" Because",
        token_ids=(5, 6, 7, 8),
    )
    return replace(stats, **changes)


def make_sample(time: float) -> TelemetrySample:
    return TelemetrySample(time, 2**33, None, 2**28, 2**30, 180.0, None, None)


def make_summary() -> RunSummary:
    one = Distribution(10.0, 1.0, 10.0, 11.0, 11.5, 11.9, 8.0, 12.0, 3)
    return RunSummary(
        num_requests=2,
        num_failed=0,
        duration_s=2.5,
        input_tokens=14,
        output_tokens=8,
        output_throughput_tok_s=3.2,
        total_throughput_tok_s=8.8,
        request_throughput_req_s=0.8,
        goodput_req_s=None,
        ttft_ms=one,
        ttft_ms_by_priority=None,
        tpot_ms=one,
        itl_ms=Distribution(),
        e2el_ms=one,
        kv_cache_usage_max=0.25,
        preemptions=0,
        preemptions_swapped=None,
        swapped_out_bytes=None,
        swapped_in_bytes=None,
        prefix_cache_hit_rate=None,
        draft_acceptance_rate=None,
        mean_acceptance_length=None,
        peak_memory_bytes=2**31,
    )


def open_and_close(url: str) -> None:
    import db.session
    from db.session import Database

    db.session.BUSY_TIMEOUT_S = 60.0
    Database.open(url).close()


def record_many(url: str, num_requests: str) -> None:
    """Record requests in many small transactions, and write after reading in between; print the statements of all puts."""
    from sqlalchemy import Engine, event

    import db.recorder
    import db.session
    from db.repository import RunRepository
    from db.session import Database

    db.recorder.COMMIT_INTERVAL_S = 0.01
    db.session.BUSY_TIMEOUT_S = 60.0  # enough for a busy machine; who is refused for having read before is so at once
    database = Database.open(url)
    repository = RunRepository(database)
    run_id = repository.create(CONFIG, WORKLOAD)
    recorder = db.recorder.RunRecorder(database, run_id)
    start = time.perf_counter()
    recorder.on_run_start(make_start(start))
    mine, is_putting, num_statements = threading.get_ident(), False, 0

    def count(*_: object) -> None:
        nonlocal num_statements
        num_statements += is_putting and threading.get_ident() == mine

    event.listen(Engine, "before_cursor_execute", count)
    for index in range(int(num_requests)):
        is_putting = True
        recorder.on_request_finished(make_request(index, start))
        is_putting = False
        if index % 100 == 0:
            run = repository.get(run_id)
            assert run is not None
            repository.set_label(run_id, f"{run.label or ''}.")
        time.sleep(0.001)
    recorder.close()
    if recorder.error:
        raise recorder.error
    database.close()
    print(run_id, num_statements)


def record_forever(url: str) -> None:
    """Record a request every 20 ms; print the run's id first, then each request's index after it was put."""
    from db.recorder import RunRecorder
    from db.repository import RunRepository
    from db.session import Database

    database = Database.open(url)
    run_id = RunRepository(database).create(CONFIG, WORKLOAD)
    print(run_id, flush=True)
    recorder = RunRecorder(database, run_id)
    start = time.perf_counter()
    recorder.on_run_start(make_start(start))
    for index in range(10_000):
        recorder.on_request_finished(make_request(index, start))
        print(index, flush=True)
        time.sleep(0.02)


PROGRAMS = {program.__name__: program for program in (open_and_close, record_many, record_forever)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
