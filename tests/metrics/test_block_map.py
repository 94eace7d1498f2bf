"""Blocks followed by their events alone are where the pool says they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.core.block_events import BlockEvent, BlockEventKind, PoolState
from backend.core.output import SchedulerOutput
from backend.engine.engine_host import EngineHost
from backend.metrics.block_map import BlockMap
from backend.metrics.ledger import StepLedger
from backend.metrics.ledger_format import EVENT_KINDS, read_chunk
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.pool_history import PoolHistory
from backend.metrics.prefix_history import PrefixHistory
from backend.metrics.stats import StepStats
from tests.core.paged_machine import VOCAB, Lab
from tests.engine.driving import answers, config_of
from tests.helpers import make_tiny_llama


def follow(lab: Lab) -> list[int]:
    """Check the map after every schedule; the steps that it was checked at."""
    lab.manager.log_events(True)
    block_map, checked = BlockMap(lab.manager.state()), []
    schedule: Callable[[], SchedulerOutput] = lab.scheduler.schedule

    def schedule_and_check() -> SchedulerOutput:
        scheduled = schedule()
        block_map.apply(lab.manager.take_events())
        state, pool = lab.manager.state(), lab.manager.pool
        assert block_map.held == state.held == lab.manager.snapshot().block_ids
        assert block_map.cached == set(state.cached)
        assert block_map.counts(pool.num_blocks) == (
            pool.num_referenced_blocks,
            pool.num_evictable_blocks,
            pool.num_free_blocks,
        )
        assert block_map.ref_counts() == {
            block: pool.ref_cnt(block) for block in range(1, pool.num_blocks + 1) if pool.ref_cnt(block)
        }
        checked.append(scheduled.step)
        return scheduled

    lab.scheduler.schedule = schedule_and_check  # type: ignore[method-assign]
    return checked


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 6)])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_every_step_of_random_traffic(
    seed: int, ahead: int, prefix_caching: bool, windows: tuple[int | None, ...]
) -> None:
    """Preemption, sharing, copies, eviction, aborts, resets, damaged logits, from a pool that is in use already."""
    rng = random.Random(seed)
    num_blocks = {(None,): 30, (5,): 14, (None, 6): 46}[windows]
    lab = Lab(
        num_blocks=num_blocks,
        block_size=2,
        max_num_seqs=5,
        max_num_batched_tokens=64 if windows == (None,) else 9,
        max_model_len=60,
        ahead=ahead,
        prefix_caching=prefix_caching,
        windows=windows,
    )
    stem = rng.choices(range(VOCAB), k=20)
    lab.add("early", stem, max_tokens=6)
    lab.step()
    checked = follow(lab)
    for index in range(60):
        key = str(index)
        prompt = stem[: rng.randint(1, 20)] + rng.choices(range(VOCAB), k=rng.randint(0, 6))
        num_tokens = [rng.randint(1, 20) for _ in range(rng.choice([1, 1, 3]))]
        request, *_ = lab.add_samples(key, prompt, len(num_tokens), num_tokens)
        if rng.random() < 0.1:
            lab.fail_at[request.request_id] = request.num_tokens
        for _ in range(rng.randint(0, 4)):
            if lab.scheduler.has_unfinished_requests():
                lab.step()
        if rng.random() < 0.1 and (output := lab.scheduler.abort_request(request.request_id)):
            lab.take(output)
        if rng.random() < 0.1:
            lab.manager.reset_prefix_cache()
    lab.run()
    assert len(checked) > 100
    assert any(step.preempted_request_ids for step in lab.steps)
    assert any(step.block_copies for step in lab.steps)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "changes",
    [
        {"swap_blocks": 12, "prefix_caching": True},
        {"swap_blocks": 5},
        {"layout": "contiguous", "num_blocks": 70},
        {"layout": "none", "num_blocks": 70},
        {"batching": "static"},
        {"policy": "priority", "swap_blocks": 8},
    ],
    ids=str,
)
def test_every_step_of_the_other_layouts_and_policies(changes: dict[str, Any], seed: int, ahead: int) -> None:
    rng = random.Random(seed)
    sizes: dict[str, Any] = {"num_blocks": 24, "block_size": 2, "max_num_seqs": 5, "max_model_len": 40}
    lab = Lab(
        **(sizes | {"max_num_batched_tokens": 64, "ahead": 0 if changes.get("layout") == "none" else ahead} | changes)
    )
    checked = follow(lab)
    for index in range(30):
        lab.add(str(index), rng.choices(range(VOCAB), k=rng.randint(1, 20)), max_tokens=rng.randint(1, 18))
        for _ in range(rng.randint(0, 4)):
            if lab.scheduler.has_unfinished_requests():
                lab.step()
    lab.run()
    assert len(checked) > 50
    if "swap_blocks" in changes:
        assert any(step.swapped_out for step in lab.steps)
        assert any(step.swapped_in for step in lab.steps)


class Sink:
    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.chunks: list[bytes] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_chunk(self, kind: str, encode: Callable[[], bytes], first_step: int, last_step: int) -> None:
        self.chunks.append(encode())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_ledger_of_an_engine_gives_the_blocks_of_each_step(asynchronous: bool, tmp_path: Path) -> None:
    """Against what every step's own record counts; key frames where they are due, and equal to what events give."""
    host, sink, rng = EngineHost(), Sink(), random.Random(1)
    try:
        settings: dict[str, Any] = {"scheduler__async_scheduling": asynchronous, "cache__num_blocks": 22}
        host.load(config_of(make_tiny_llama(tmp_path / "model"), **settings))
        stem = [rng.randrange(256) for _ in range(60)]
        answers(host, {"before": stem}, max_tokens=4)
        host.set_sink(sink)  # type: ignore[arg-type]
        for turn in range(6):
            prompts = {f"{turn}.{index}": [*stem[: 10 * index], turn, index] for index in range(6)}
            answers(host, prompts, max_tokens=50, ignore_eos=True)
        host.set_sink(None)
    finally:
        host.close()
    block_map, kinds, frames = None, set(), 0
    by_step = {stats.step: stats for stats in sink.steps}
    for data in sink.chunks:
        segment = read_chunk(data)
        for index, step in enumerate(segment.steps):
            if block_map is not None:
                block_map.apply(step.events)
            if index == 0 and segment.key_frame is not None:
                frames += 1
                fresh = BlockMap(segment.key_frame)
                assert block_map is None or (block_map.held, block_map.cached) == (fresh.held, fresh.cached)
                block_map = fresh
            assert block_map is not None, "the first chunk begins with a key frame"
            kinds |= {event.kind for event in step.events}
            stats = by_step.pop(step.step)
            assert block_map.counts(22) == (
                stats.num_referenced_blocks,
                stats.num_evictable_blocks,
                stats.num_free_blocks,
            )
            assert set(block_map.held) >= {entry.request_id for entry in step.entries}
    assert not by_step
    assert frames == 1 + (len(sink.steps) - 1) // 256 > 1
    assert kinds >= {"allocate", "share", "free", "preempt", "evict", "cache"}


AFTER = {  # of each kind of event: what "a" and "b" hold then, and what can be found; see `block_events`
    "allocate": ({"a": [[1, 2, 3, 9]], "b": [[1]]}, {1, 2, 5}),
    "share": ({"a": [[1, 2, 3, 9]], "b": [[1]]}, {1, 2, 5}),
    "swap_in": ({"a": [[1, 2, 3, 9]], "b": [[1]]}, {1, 2, 5}),
    "copy": ({"a": [[9, 2, 3]], "b": [[1]]}, {1, 2, 5}),
    "give_back": ({"a": [[1]], "b": [[1]]}, {1, 2, 5}),
    "slide": ({"a": [[0, 0, 3]], "b": [[1]]}, {1, 2, 5}),
    "free": ({"b": [[1]]}, {1, 2, 5}),
    "preempt": ({"b": [[1]]}, {1, 2, 5}),
    "swap_out": ({"b": [[1]]}, {1, 2, 5}),
    "cache": ({"a": [[1, 2, 3]], "b": [[1]]}, {1, 2, 3, 5}),
    "evict": ({"a": [[1, 2, 3]], "b": [[1]]}, {1, 2}),
    "uncache": ({"a": [[1, 2, 3]], "b": [[1]]}, {1, 2}),
}
BLOCKS = {
    "copy": [1, 9],
    "slide": [1, 2],
    "give_back": [2, 3],
    "cache": [3],
    "evict": [5],
    "uncache": [5],
    "free": [],
    "preempt": [],
}


@pytest.mark.parametrize("kind", EVENT_KINDS)
def test_every_kind_of_event_does_the_same_to_all_that_follow(kind: BlockEventKind) -> None:
    """So that a new kind is a new line here and in `BlockMap.apply`."""
    state = PoolState({"a": [[1, 2, 3]], "b": [[1]]}, [1, 2, 5])
    request_id = None if kind in ("cache", "evict", "uncache") else "a"
    event = BlockEvent(kind, request_id, 0, BLOCKS.get(kind, [9]))
    ledger = StepLedger()
    ledger.append(0, ["a"], [1], ["decode"], (), state)
    ledger.append(1, ["b"], [1], ["decode"], [event])
    chunk = ledger.flush()
    assert chunk is not None
    reader = LedgerReader([(chunk.encode(), 0, 1)])
    history, moment = PrefixHistory(4), PoolHistory(reader, 4).at(1)
    assert history.extend(reader)
    assert moment is not None
    block_map = reader.block_map(1)
    assert block_map is not None
    for followed in (block_map, moment.blocks, history):
        assert (followed.held, followed.cached) == AFTER[kind]


def test_forgetting_everything_is_an_event_without_blocks() -> None:
    block_map = BlockMap(PoolState({"a": [[1]]}, [1, 2]))
    block_map.apply([BlockEvent("uncache", None, 0, [])])
    assert (block_map.held, block_map.cached) == ({"a": [[1]]}, set())
