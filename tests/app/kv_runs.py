"""Runs with a step ledger, written by the real recorder from a real scheduler over a small pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from app.services import Services
from backend.config import EngineConfig
from backend.core.block_events import PoolState
from backend.metrics.ledger import LEDGER_KIND, LedgerChunk, StepLedger
from backend.metrics.stats import RunEnd, RunStart, StepStats
from backend.workload.spec import Workload
from db.recorder import RunRecorder
from db.repository import RunRepository
from db.session import Database
from tests.core.paged_machine import VOCAB, Lab

BLOCK_SIZE = 4
NUM_BLOCKS = 30
STEP_S = 0.05
NUM_STEPS = 40
CHUNK_ENDS = (15, 31, 36)


class Traffic(NamedTuple):
    """What was written for each step, and the truth it was written from."""

    steps: list[StepStats]
    states: list[PoolState]
    computed: list[dict[str, int]]  # tokens of the requests that hold blocks
    chunks: list[LedgerChunk]


def traffic(run_id: int, *, with_events: bool = True, num_steps: int = NUM_STEPS) -> Traffic:
    """Requests `<run>-<index>` with a common beginning; chunks of the ledger end at `CHUNK_ENDS` and at the end."""
    rng = random.Random(2)
    lab = Lab(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=4, prefix_caching=True)
    lab.manager.log_events(True)
    stem = rng.choices(range(VOCAB), k=12)
    ledger, made, index = StepLedger(), Traffic([], [], [], []), 0
    for step in range(num_steps):
        while len(lab.scheduler.requests) < 5:
            lab.add(
                f"{run_id}-{index}",
                stem + rng.choices(range(VOCAB), k=rng.randint(1, 9)),
                max_tokens=rng.randint(1, 20),
            )
            index += 1
        scheduled = lab.scheduler.schedule()
        state, rows, pool = lab.manager.state(), scheduled.num_scheduled_tokens, lab.manager.pool
        made.states.append(state)
        made.computed.append({key: lab.scheduler.requests[key].num_computed_tokens for key in state.held})
        events = lab.manager.take_events() if with_events else []
        frame = state if step == 0 and with_events else None
        ledger.append(step, rows, rows.values(), scheduled.kinds.values(), events, frame)
        if step in CHUNK_ENDS and (chunk := ledger.flush()):
            made.chunks.append(chunk)
        made.steps.append(decode_step(step, len(rows), pool.num_referenced_blocks, pool.num_evictable_blocks))
        for output in lab.scheduler.update_from_output(scheduled, lab.machine.execute(scheduled)):
            lab.take(output)
    if chunk := ledger.flush():
        made.chunks.append(chunk)
    return made


def start_kv_run(services: Services, settings: dict[str, Any] | None = None) -> tuple[int, RunRecorder]:
    """A run under way that has no step yet."""
    config = EngineConfig().with_overrides({"cache.block_size": BLOCK_SIZE} | (settings or {}))
    return start_run_of_blocks(services.database, config, NUM_BLOCKS, num_requests=100, max_model_len=100)


def start_run_of_blocks(
    database: Database,
    config: EngineConfig,
    num_blocks: int,
    *,
    num_requests: int,
    max_model_len: int,
    label: str | None = None,
) -> tuple[int, RunRecorder]:
    """A run under way over a pool of that many blocks, from the clock's 0 on."""
    run_id = RunRepository(database).create(config.to_dict(), Workload().to_dict(), label)
    recorder = RunRecorder(database, run_id)
    recorder.on_run_start(
        RunStart(
            start_time=0.0,
            resolved_config=config.resolve(device="cpu", max_model_len=max_model_len).to_dict(),
            environment={},
            load={"num_blocks": num_blocks},
            notices=(),
            cache_state={"state": "cold", "num_cached_tokens": 0},
            num_requests=num_requests,
        )
    )
    recorder.flush()
    return run_id, recorder


def feed(recorder: RunRecorder, steps: Sequence[StepStats], chunks: Sequence[LedgerChunk]) -> None:
    for chunk in chunks:
        recorder.on_chunk(LEDGER_KIND, *chunk)
    for step in steps:
        recorder.on_step(step)
    recorder.flush()


def add_kv_run(services: Services, *, with_events: bool = True) -> tuple[int, Traffic]:
    """A run that is over; the truth about it beside its id."""
    run_id, recorder = start_kv_run(services)
    made = traffic(run_id, with_events=with_events)
    feed(recorder, made.steps, made.chunks)
    end(recorder)
    return run_id, made


def end(recorder: RunRecorder) -> None:
    recorder.on_run_end(RunEnd("finished", NUM_STEPS * STEP_S, None, None))
    recorder.close()


def decode_step(
    step: int, num_requests: int, referenced: int, evictable: int, num_blocks: int = NUM_BLOCKS, step_s: float = STEP_S
) -> StepStats:
    """A step in which each request decodes one token; steps follow each other without a pause."""
    return StepStats(
        step=step,
        end_time=(step + 1) * step_s,
        duration_ms=step_s * 1e3,
        schedule_ms=0.1,
        execute_ms=step_s * 1e3 - 0.2,
        process_ms=0.1,
        num_scheduled_requests=num_requests,
        num_prefill_tokens=0,
        num_decode_tokens=num_requests,
        num_output_tokens=num_requests,
        num_running=num_requests,
        num_waiting=0,
        num_preempted=0,
        num_referenced_blocks=referenced,
        num_evictable_blocks=evictable,
        num_free_blocks=num_blocks - referenced - evictable,
    )
