"""Slots that are lost although no block is: behind a window, and in free blocks that no request can get."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from backend.config import EngineConfig
from backend.core.block_events import PoolState
from backend.metrics.block_map import BlockMap
from backend.metrics.kv_use import KVPool, KVUse, kv_use
from tests.core.paged_machine import VOCAB, Lab

BLOCK_SIZE = 4
NUM_STEPS = 120


def traffic(lab: Lab) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """One to six requests at once that begin alike; per step the tokens that each holds, and those that it computes."""
    rng, count = random.Random(5), 0
    stem = rng.choices(range(VOCAB), k=20)
    for step in range(NUM_STEPS):
        while len(lab.scheduler.requests) < 1 + step // 10 % 6:
            prompt = stem[: rng.randint(1, 20)] + rng.choices(range(VOCAB), k=3)
            lab.add(str(count), prompt, max_tokens=rng.randint(1, 30))
            count += 1
        scheduled = lab.scheduler.schedule()
        tokens = {key: lab.scheduler.requests[key].num_computed_tokens for key in lab.manager.state().held}
        yield tokens, dict(scheduled.num_scheduled_tokens)
        for output in lab.scheduler.update_from_output(scheduled, lab.machine.execute(scheduled)):
            lab.take(output)


def use_of(lab: Lab, tokens: dict[str, int], scheduled: dict[str, int], pool: KVPool) -> KVUse:
    return kv_use(BlockMap(lab.manager.state()), tokens, BLOCK_SIZE, pool, scheduled)


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
@pytest.mark.parametrize("num_blocks", [60, 67])
def test_unusable_slots_are_those_left_when_nobody_else_can_begin(
    windows: tuple[int | None, ...], num_blocks: int
) -> None:
    """Fifteen blocks are one request's part of a group."""
    lab = Lab(
        layout="contiguous",
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=60,
        max_num_seqs=8,
        windows=windows,
    )
    config = EngineConfig().with_overrides({"cache.layout": "contiguous", "cache.block_size": BLOCK_SIZE})
    model = {"num_layers": 2, "sliding_window": 9, "sliding_layers": [1] if len(windows) == 2 else []}
    pool = KVPool.of_run(config.resolve(device="cpu", max_model_len=60).to_dict(), model, num_blocks)
    seen = set()
    for tokens, scheduled in traffic(lab):
        left = copy.deepcopy(lab.manager.pool)
        while left.allocate(lab.manager.blocks_needed(1)) is not None:
            pass
        use = use_of(lab, tokens, scheduled, pool)
        assert use.num_unusable_slots == left.num_free_blocks * BLOCK_SIZE
        seen.add((use.num_unusable_slots, len(tokens)))
    assert {slots for slots, _ in seen} == {0 if num_blocks == 60 else 7 * BLOCK_SIZE}
    assert len({held for _, held in seen}) >= (3 if len(windows) == 1 else 2), "the pool was meant to fill and to empty"


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("windows", [(9,), (None, 6)])
def test_slots_behind_every_holder_s_window(windows: tuple[int | None, ...], prefix_caching: bool) -> None:
    lab = Lab(
        num_blocks=60,
        block_size=BLOCK_SIZE,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        prefix_caching=prefix_caching,
        windows=windows,
    )
    pool, uses = KVPool(60, windows), []
    for tokens, scheduled in traffic(lab):
        full, seen = set(), set()
        for key, groups in lab.manager.state().held.items():
            for blocks, window in zip(groups, windows, strict=True):
                where = [(block, slot) for block in blocks for slot in range(BLOCK_SIZE)][: tokens[key]]
                full |= {(block, slot) for block, slot in where if block}
                for query in range(tokens[key] - scheduled.get(key, 0), tokens[key] + 1):
                    seen |= set(where[max(0, query + 1 - window) if window else 0 : query + 1])
        use = use_of(lab, tokens, scheduled, pool)
        assert use.num_passed_slots == len(full - seen)
        assert use.num_unusable_slots == 0
        if not prefix_caching:  # no block is another's: so all slots are of one kind
            assert use.num_slots == len(full) + use.num_unused_slots + use.num_reserved_slots
        uses.append(use)
    assert sum(use.num_passed_slots > 0 for use in uses) > NUM_STEPS // 2
    assert not prefix_caching or any(use.num_shared_blocks for use in uses)


def test_a_shared_block_is_passed_as_far_as_the_last_of_its_holders() -> None:
    """Window 4 over blocks of 4: `a` is at 9 tokens and sees from 6 on, `b` at 8 sees from 5 on; `c` is not known."""
    state = PoolState({"a": [[0, 2, 3]], "b": [[0, 2]], "c": [[7]]}, [2])
    use = kv_use(BlockMap(state), {"a": 9, "b": 8}, BLOCK_SIZE, KVPool(9, (4,)))
    assert (use.num_passed_slots, use.num_unused_slots) == (1, 3)
    assert (use.num_wasted_slots, use.num_slots) == (4, 12)
    assert use.wasted_share == pytest.approx(4 / 12)
    earlier = kv_use(BlockMap(state), {"a": 9, "b": 8}, BLOCK_SIZE, KVPool(9, (4,)), {"b": 1})
    assert earlier.num_passed_slots == 0, "the step's own token still sees one slot more"


@pytest.mark.parametrize(
    ("layout", "model", "windows", "region_size"),
    [
        ("contiguous", {}, (None,), 7),
        ("contiguous", {"num_layers": 4, "sliding_window": 32, "sliding_layers": [2, 3]}, (None, 32), 14),
        ("paged", {"num_layers": 4, "sliding_window": 32, "sliding_layers": [0, 1, 2, 3]}, (32,), 1),
        ("none", {"num_layers": 4, "sliding_window": None, "sliding_layers": []}, (None,), 1),
    ],
)
def test_what_a_run_s_record_says_of_its_pool(
    layout: str, model: dict[str, Any], windows: tuple[int | None, ...], region_size: int
) -> None:
    config = EngineConfig().with_overrides({"cache.layout": layout, "cache.block_size": 16})
    resolved = config.resolve(device="cpu", max_model_len=100).to_dict()
    assert KVPool.of_run(resolved, model, 50) == KVPool(50, windows, region_size)
