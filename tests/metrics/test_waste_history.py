"""What each step of a ledger wasted, against the scheduler's own tables, counted slot by slot."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pytest

from backend.core.block_events import PoolState
from backend.metrics.kv_use import KVPool, kv_use
from backend.metrics.ledger import LedgerChunk, StepLedger
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.pool_history import PoolHistory
from backend.metrics.waste_history import Chunk, WasteHistory, WastePoint
from tests.core.paged_machine import VOCAB, Lab
from tests.metrics.waste_truth import naive_waste

BLOCK_SIZE = 4
MAX_MODEL_LEN = 60
NUM_STEPS = 300
FIGURES = [each.name for each in fields(WastePoint)]


@dataclass
class Written:
    pool: KVPool
    chunks: list[Chunk] = field(default_factory=list)
    truths: list[dict[str, int]] = field(default_factory=list)  # of each step, by the names of `WastePoint`
    kinds: Counter[str] = field(default_factory=Counter)  # of events

    @property
    def history(self) -> WasteHistory:
        return WasteHistory(BLOCK_SIZE, self.pool)


def record(windows: tuple[int | None, ...] = (None,), num_blocks: int = 45, **settings: Any) -> Written:
    """One to six requests at once that begin alike, some with several samples, in chunks of any length."""
    lab = Lab(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        max_model_len=MAX_MODEL_LEN,
        windows=windows,
        **settings,
    )
    contiguous = settings.get("layout") == "contiguous"
    region_size = len(windows) * -(-MAX_MODEL_LEN // BLOCK_SIZE) if contiguous else 1
    written = Written(KVPool(num_blocks, windows, region_size))
    lab.manager.log_events(True)
    rng, ledger, count = random.Random(7), StepLedger(), 0
    stem = rng.choices(range(VOCAB), k=20)

    def keep(chunk: LedgerChunk | None) -> None:
        if chunk is not None:
            written.chunks.append((chunk.encode(), chunk.first_step, chunk.last_step))

    for step in range(NUM_STEPS):
        while len(lab.scheduler.requests) < 1 + step // 10 % 6:
            prompt = stem[: rng.randint(1, 20)] + rng.choices(range(VOCAB), k=3)
            counts = [rng.randint(1, 30) for _ in range(rng.choice([1, 1, 2]))]
            lab.add_samples(str(count), prompt, len(counts), counts)
            count += 1
        if step == NUM_STEPS // 2:
            lab.manager.reset_prefix_cache()
        scheduled = lab.scheduler.schedule()
        lab.manager.check_integrity()
        rows, state = scheduled.num_scheduled_tokens, lab.manager.state(lab.scheduler.requests)
        num_free = lab.manager.pool.num_free_blocks
        written.truths.append(naive_waste(state.held, state.num_tokens, rows, num_free, written.pool, BLOCK_SIZE))
        events = lab.manager.take_events()
        written.kinds.update(event.kind for event in events)
        keep(ledger.append(step, rows, rows.values(), scheduled.kinds.values(), events, None if step % 64 else state))
        if rng.random() < 0.1:
            keep(ledger.flush())
        for output in lab.scheduler.update_from_output(scheduled, lab.machine.execute(scheduled)):
            lab.take(output)
    keep(ledger.flush())
    return written


TRAFFIC: dict[str, tuple[dict[str, Any], set[str]]] = {
    "paged": ({"num_blocks": 30}, {"allocate", "share", "copy", "free"}),
    "prefix caching": ({"prefix_caching": True}, {"share", "copy", "cache", "evict", "uncache"}),
    "swap": ({"num_blocks": 24, "swap_blocks": 40}, {"swap_out", "swap_in"}),
    "contiguous": ({"layout": "contiguous"}, {"allocate"}),
    "contiguous, a rest": ({"layout": "contiguous", "num_blocks": 52}, {"allocate"}),
    "windows": ({"windows": (None, 9)}, {"slide", "share"}),
    "a window and prefix caching": ({"windows": (9,), "prefix_caching": True}, {"slide", "share", "cache"}),
    "windows and swap": ({"windows": (None, 9), "num_blocks": 36, "swap_blocks": 60}, {"slide", "swap_in"}),
    "contiguous with windows": ({"windows": (9, None), "layout": "contiguous", "num_blocks": 70}, {"allocate"}),
}


@pytest.fixture(scope="module", params=list(TRAFFIC))
def written(request: pytest.FixtureRequest) -> Written:
    settings, kinds = TRAFFIC[request.param]
    made = record(**settings)
    assert set(made.kinds) >= kinds
    return made


def check(history: WasteHistory, written: Written) -> list[WastePoint]:
    points = [history.at(step) for step in history.steps]
    for step, (point, truth) in enumerate(zip(points, written.truths, strict=False)):
        assert asdict(point) == {"step": step} | truth
        assert point.num_used_slots + point.num_wasted_slots == point.num_slots
    return points


def test_every_step(written: Written) -> None:
    history = written.history
    history.extend(written.chunks)
    assert history.steps == range(NUM_STEPS)
    points = check(history, written)
    assert len({point.num_slots for point in points}) > 1
    assert any(point.num_wasted_slots for point in points)
    if any(written.pool.windows):
        assert sum(point.num_passed_slots > 0 for point in points) > NUM_STEPS // 3


def test_a_ledger_that_grows(written: Written) -> None:
    history = written.history
    for chunk in written.chunks:
        history.extend([chunk])
        assert history.steps == range(chunk[2] + 1)
        check(history, written)


def test_it_agrees_with_the_use_of_one_step(written: Written) -> None:
    history, pools = written.history, PoolHistory(LedgerReader(written.chunks), BLOCK_SIZE)
    history.extend(written.chunks)
    for step in range(NUM_STEPS):
        moment = pools.at(step)
        assert moment is not None
        scheduled = {entry.request_id: entry.num_scheduled_tokens for entry in moment.step.entries}
        use, point = kv_use(moment.blocks, moment.num_tokens, BLOCK_SIZE, written.pool, scheduled), history.at(step)
        assert point.num_wasted_slots == use.num_wasted_slots
        assert (point.num_slots, point.num_saved_slots) == (use.num_slots, use.num_saved_blocks * BLOCK_SIZE)
        assert (point.num_unusable_slots, point.num_requests) == (use.num_unusable_slots, len(use.requests))


def test_totals_weigh_a_step_by_what_is_held_in_it(written: Written) -> None:
    history = written.history
    history.extend(written.chunks)
    for first in (0, 1, 117, NUM_STEPS - 1):
        truths = written.truths[first:]
        wasted = sum(t["num_unused_slots"] + t["num_reserved_slots"] + t["num_passed_slots"] for t in truths)
        totals = history.totals(first)
        assert totals.wasted_share == pytest.approx(wasted / sum(t["num_slots"] for t in truths))
        saved = sum(t["num_saved_slots"] for t in truths)
        assert totals.saved_share == pytest.approx(saved / (saved + sum(t["num_slots"] for t in truths)))
        assert totals.most_requests == max(t["num_requests"] for t in truths)
    assert history.totals(NUM_STEPS).wasted_share is None


@pytest.mark.parametrize("max_points", [14, 60, NUM_STEPS - 1])
def test_thinned_steps_are_real_and_keep_the_extremes(written: Written, max_points: int) -> None:
    history = written.history
    history.extend(written.chunks)
    everything = history.thinned(NUM_STEPS)
    assert everything == [history.at(step) for step in range(NUM_STEPS)]
    kept = history.thinned(max_points)
    assert len(kept) <= max_points
    assert kept == [everything[point.step] for point in kept]
    steps = [point.step for point in kept]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, NUM_STEPS - 1)
    for name in (*FIGURES, "num_wasted_slots"):
        assert max(getattr(point, name) for point in kept) == max(getattr(point, name) for point in everything)
    for name in ("num_slots", "num_wasted_slots"):
        assert min(getattr(point, name) for point in kept) == min(getattr(point, name) for point in everything)


def test_too_few_points_to_keep_the_extremes() -> None:
    with pytest.raises(ValueError, match="max_points 13 is below 14"):
        WasteHistory(BLOCK_SIZE, KVPool(9)).thinned(13)


def test_steps_before_the_first_key_frame_and_a_ledger_without_one() -> None:
    ledger = StepLedger()
    ledger.append(0, ["r"], [3], ["prefill"])
    older = ledger.flush()
    ledger.append(1, ["r"], [1], ["decode"], (), PoolState({"r": [[5, 6]]}, [9]))
    newer = ledger.flush()
    assert older is not None
    assert newer is not None
    history = WasteHistory(BLOCK_SIZE, KVPool(9))
    history.extend([(older.encode(), 0, 0)])
    assert (history.steps, history.next_step) == (range(1, 1), 1)
    history.extend([(newer.encode(), 1, 1)])
    assert history.steps == range(1, 2)
    nothing = dict.fromkeys(FIGURES, 0)
    expected = WastePoint(**nothing | {"step": 1, "num_slots": 8, "num_requests": 1})
    assert history.at(1) == expected, "tokens that are not known count as used"
    with pytest.raises(IndexError, match="step 0 "):
        history.at(0)
