"""A stored run over a pool of 100,000 blocks: 256 requests in groups with a common beginning, some of which end and begin."""

from __future__ import annotations

import random
from collections import deque
from itertools import count, repeat

from backend.config import EngineConfig
from backend.core.block_events import BlockEvent, PoolState
from backend.metrics.ledger import LEDGER_KIND, StepLedger
from backend.metrics.stats import RunEnd
from db.recorder import RunRecorder
from db.session import Database
from tests.app.kv_runs import decode_step, start_run_of_blocks

NUM_BLOCKS, BLOCK_SIZE = 100_000, 16
NUM_REQUESTS, GROUP = 256, 8
PREFIX, MIN_OWN, MAX_OWN = 60, 300, 390  # blocks
NUM_STEPS, ENDS_PER_STEP = 16, 3


def add_large_run(database: Database) -> int:
    """Its id."""
    config = EngineConfig().with_overrides(
        {
            "model.name": "dummy:tiny",
            "model.device": "cpu",
            "cache.num_blocks": NUM_BLOCKS,
            "cache.block_size": BLOCK_SIZE,
        }
    )
    run_id, recorder = start_run_of_blocks(
        database, config, NUM_BLOCKS, num_requests=NUM_REQUESTS, max_model_len=8192, label="large pool"
    )
    _feed(recorder, run_id)
    recorder.on_run_end(RunEnd("finished", float(NUM_STEPS), None, None))
    recorder.close()
    return run_id


def _feed(recorder: RunRecorder, run_id: int) -> None:
    rng = random.Random(3)
    ids = list(range(1, NUM_BLOCKS + 1))
    for start in range(0, NUM_BLOCKS, 500):  # runs of neighbours in any order, as in a pool that has been used
        part = ids[start : start + 500]
        rng.shuffle(part)
        ids[start : start + 500] = part
    free, numbers = deque(ids), count()
    held: dict[str, list[int]] = {}
    prefixes = [[free.popleft() for _ in range(PREFIX)] for _ in range(NUM_REQUESTS // GROUP)]
    cached = {block for blocks in prefixes for block in blocks}
    tokens: dict[str, int] = {}

    def begin() -> list[BlockEvent]:
        number = next(numbers)
        key, prefix = f"run{run_id}-{number}", prefixes[number % len(prefixes)]
        own = [free.popleft() for _ in range(rng.randint(MIN_OWN, MAX_OWN))]
        held[key], tokens[key] = prefix + own, PREFIX * BLOCK_SIZE
        return [BlockEvent("share", key, 0, prefix), BlockEvent("allocate", key, 0, own)]

    for _ in range(NUM_REQUESTS):
        begin()
    tokens = {key: len(blocks) * BLOCK_SIZE - rng.randrange(BLOCK_SIZE) for key, blocks in held.items()}
    ledger = StepLedger()
    for step in range(NUM_STEPS):
        events = []
        for key in list(held)[:ENDS_PER_STEP] if step else ():
            found = held.pop(key)[PREFIX:]
            del tokens[key]
            kept = set(found[: len(found) // 2])  # full blocks that can be found
            events += [BlockEvent("cache", key, 0, sorted(kept)), BlockEvent("free", key, 0, [])]
            cached |= kept
            free.extend(block for block in found if block not in kept)
            events += begin()
        scheduled = {key: 1 if tokens.get(key) else len(blocks) for key, blocks in held.items()}
        frame = (
            PoolState({key: [blocks] for key, blocks in held.items()}, sorted(cached), dict(tokens))
            if not step
            else None
        )
        ledger.append(step, scheduled, scheduled.values(), repeat("decode", len(scheduled)), events, frame)
        referenced = len({block for blocks in held.values() for block in blocks})
        evictable = len(cached - {block for blocks in held.values() for block in blocks})
        recorder.on_step(decode_step(step, len(held), referenced, evictable, NUM_BLOCKS, step_s=1.0))
    chunk = ledger.flush()
    assert chunk is not None
    recorder.on_chunk(LEDGER_KIND, *chunk)
