"""How full blocks are at any step of a ledger, against the scheduler and a pool that is counted slot by slot."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest

from backend.core.block_events import BlockEvent, PoolState
from backend.core.output import ModelRunnerOutput
from backend.metrics import ledger_reader
from backend.metrics.block_map import BlockMap
from backend.metrics.kv_use import KVUse, kv_use
from backend.metrics.ledger import KEY_FRAME_STEPS, LedgerChunk, StepLedger
from backend.metrics.ledger_format import LedgerSegment, read_chunk
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.pool_history import PoolHistory
from tests.core.paged_machine import VOCAB, Lab

BLOCK_SIZE = 4
NUM_STEPS = 2 * KEY_FRAME_STEPS + 40


class Truth(NamedTuple):
    held: dict[str, list[list[int]]]
    num_tokens: dict[str, int]  # of the requests that hold blocks, as the scheduler counts them


class Written(NamedTuple):
    chunks: list[tuple[bytes, int, int]]
    truths: list[Truth]

    @property
    def reader(self) -> LedgerReader:
        return LedgerReader(self.chunks)


def record(
    layout: str, prefix_caching: bool, max_tokens: int, window: int | None = None, *, frames_tell_tokens: bool = True
) -> Written:
    """Traffic that preempts, shares, copies and evicts, with an id that is used again, and a step in flight."""
    rng = random.Random(3)
    lab = Lab(
        num_blocks=30 if window is None else 18,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        ahead=layout != "none",
        prefix_caching=prefix_caching,
        layout=layout,
        max_model_len=60,
        max_num_batched_tokens=64 if window is None else 16,
        windows=(window,),
    )
    lab.manager.log_events(True)
    ledger, written, stem = StepLedger(), Written([], []), rng.choices(range(VOCAB), k=30)

    def keep(chunk: LedgerChunk | None) -> None:
        if chunk is not None:
            written.chunks.append((chunk.encode(), chunk.first_step, chunk.last_step))

    schedule, again = lab.scheduler.schedule, 0

    def schedule_and_keep():
        scheduled = schedule()
        rows = scheduled.num_scheduled_tokens
        if rows or scheduled.preempted_request_ids:
            number = len(written.truths)
            state = lab.manager.state(lab.scheduler.requests if frames_tell_tokens else None)
            computed = {key: lab.scheduler.requests[key].num_computed_tokens for key in state.held}
            written.truths.append(Truth(state.held, computed))
            frame = state if number % KEY_FRAME_STEPS == 0 else None
            events = [
                event._replace(kind="preempt")
                if event.kind == "free" and event.request_id in scheduled.preempted_request_ids
                else event
                for event in lab.manager.take_events()
            ]
            keep(ledger.append(number, rows, rows.values(), scheduled.kinds.values(), events, frame))
            if rng.random() < 0.1:
                keep(ledger.flush())
        return scheduled

    lab.scheduler.schedule = schedule_and_keep  # type: ignore[method-assign]
    while len(written.truths) < NUM_STEPS:
        while len(lab.scheduler.requests) < 5:
            key = str(again % 7)  # soon in use by another request
            again += 1
            if key not in {request.parent_id or request.request_id for request in lab.scheduler.requests.values()}:
                prompt = stem[: rng.randint(1, 30)] + rng.choices(range(VOCAB), k=3)
                counts = [rng.randint(1, max_tokens) for _ in range(rng.choice([1, 1, 3]))]
                for request in lab.add_samples(key, prompt, len(counts), counts):
                    lab.finished.pop(request.request_id, None)
        lab.step()
    keep(ledger.flush())
    return written


@pytest.fixture(
    scope="module",
    params=[
        ("paged", True, 300),
        ("paged", False, 25),
        ("contiguous", False, 25),
        ("none", False, 25),
        ("paged", False, 25, 9),
        ("paged", True, 300, 9),
    ],
)
def written(request: pytest.FixtureRequest) -> Written:
    return record(*request.param)


def naive(truth: Truth) -> dict[str, int]:
    """Slots and references of the pool, each looked at by itself."""
    holders = Counter(block for groups in truth.held.values() for block in groups[0] if block)
    written_slots = {
        (groups[0][position // BLOCK_SIZE], position % BLOCK_SIZE)
        for key, groups in truth.held.items()
        for position in range(truth.num_tokens[key])
        if groups[0][position // BLOCK_SIZE]  # and not behind a window
    }
    blocks_with_tokens = {block for block, _ in written_slots}
    empty = [(block, slot) for block in holders for slot in range(BLOCK_SIZE) if (block, slot) not in written_slots]
    return {
        "num_references": sum(holders.values()),
        "num_referenced_blocks": len(holders),
        "num_shared_blocks": sum(number > 1 for number in holders.values()),
        "num_slots": len(holders) * BLOCK_SIZE,
        "num_unused_slots": sum(block in blocks_with_tokens for block, _ in empty),
        "num_reserved_slots": sum(block not in blocks_with_tokens for block, _ in empty),
    }


def check(history: PoolHistory, number: int, truth: Truth) -> KVUse:
    moment = history.at(number)
    assert moment is not None
    assert moment.step.step == number
    assert moment.blocks.held == truth.held
    assert moment.num_tokens == truth.num_tokens
    use = kv_use(moment.blocks, moment.num_tokens, BLOCK_SIZE)
    expected = naive(truth)
    assert {name: getattr(use, name) for name in expected} == expected
    for key, part in use.requests.items():
        shared = sum(
            any(block in other[0] for name, other in truth.held.items() if name != key)
            for block in truth.held[key][0]
            if block
        )
        assert (part.num_blocks, part.num_shared, part.num_tokens) == (
            sum(map(bool, truth.held[key][0])),
            shared,
            truth.num_tokens[key],
        )
    return use


def test_tokens_and_waste_forwards(written: Written) -> None:
    history = PoolHistory(written.reader, BLOCK_SIZE)
    uses = [check(history, number, truth) for number, truth in enumerate(written.truths[:400])]
    assert any(use.num_unused_slots for use in uses)


def test_tokens_and_waste_in_any_order(written: Written) -> None:
    history = PoolHistory(written.reader, BLOCK_SIZE)
    for number in random.Random(1).sample(range(NUM_STEPS), 120):
        check(history, number, written.truths[number])


def test_key_frames_that_do_not_tell_tokens() -> None:
    """As in older ledgers: the beginning of each request is looked for."""
    told, found = record("paged", True, 300), record("paged", True, 300, frames_tell_tokens=False)
    assert told.truths == found.truths
    assert told.chunks != found.chunks
    history = PoolHistory(found.reader, BLOCK_SIZE)
    for number in random.Random(2).sample(range(NUM_STEPS), 60):
        check(history, number, found.truths[number])


def test_no_step_reads_beyond_its_key_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that run through the whole ledger, in chunks of 16 steps: each is decoded at most once, in any order."""
    ledger, lab, chunks = StepLedger(), Lab(num_blocks=1000, block_size=BLOCK_SIZE, max_model_len=900), []
    lab.manager.log_events(True)
    for _ in range(3):
        lab.add_samples(str(len(lab.scheduler.requests)), [1, 2, 3], 1, [880])
    truths = []
    for number in range(3 * KEY_FRAME_STEPS):
        scheduled = lab.scheduler.schedule()
        frame = lab.manager.state(lab.scheduler.requests) if number % KEY_FRAME_STEPS == 0 else None
        rows = scheduled.num_scheduled_tokens
        full = ledger.append(number, rows, rows.values(), scheduled.kinds.values(), lab.manager.take_events(), frame)
        chunks += [full, ledger.flush() if number % 16 == 15 else None]
        truths.append({key: request.num_computed_tokens for key, request in lab.scheduler.requests.items()})
        lab.scheduler.update_from_output(scheduled, ModelRunnerOutput({key: [1] for key in rows}))
    assert len(truths[-1]) == 3
    stored = [(chunk.encode(), chunk.first_step, chunk.last_step) for chunk in chunks if chunk]
    assert len(stored) == 48
    decoded: list[range] = []

    def counted(data: bytes) -> LedgerSegment:
        segment = read_chunk(data)
        decoded.append(range(segment.steps[0].step, segment.steps[-1].step + 1))
        return segment

    monkeypatch.setattr(ledger_reader, "read_chunk", counted)
    for number in range(0, len(truths), 7):
        decoded.clear()
        moment = PoolHistory(LedgerReader(stored), BLOCK_SIZE).at(number)
        assert moment is not None
        assert moment.num_tokens == truths[number]
        begin = number // KEY_FRAME_STEPS * KEY_FRAME_STEPS
        assert sorted(step for steps in decoded for step in steps) == list(range(begin, number // 16 * 16 + 16))


def test_a_ledger_that_grows(written: Written) -> None:
    history = PoolHistory(LedgerReader(written.chunks[:1]), BLOCK_SIZE)
    for chunk in written.chunks[1:]:
        history.extend([chunk])
        newest = history.steps[-1]
        check(history, newest, written.truths[newest])


def test_what_layouts_do_to_blocks() -> None:
    """So that the tests above have seen it: sharing, preemption, reservation."""
    shared, alone, reserved = record("paged", True, 300), record("paged", False, 25), record("contiguous", False, 25)
    assert any(naive(truth)["num_shared_blocks"] for truth in shared.truths)
    kinds = {event.kind for number in range(NUM_STEPS) for event in shared.reader.step(number).events}
    assert kinds >= {"allocate", "share", "free", "preempt", "evict", "cache"}
    assert not any(naive(truth)["num_reserved_slots"] for truth in alone.truths)
    assert all(naive(truth)["num_reserved_slots"] for truth in reserved.truths if truth.held)
    slid = record("paged", False, 25, 9)
    assert sum(event.kind == "slide" for number in range(NUM_STEPS) for event in slid.reader.step(number).events) > 50


def test_a_request_that_began_before_the_ledger_counts_as_full() -> None:
    ledger = StepLedger()
    ledger.append(0, ["old"], [1], ["decode"], (), PoolState({"old": [[3, 4]]}, []))
    ledger.append(1, ["old"], [1], ["decode"], [BlockEvent("allocate", "old", 0, [5])])
    encode, first, last = ledger.flush()  # type: ignore[misc]
    for numbers in ([1], [0, 1]):
        history = PoolHistory(LedgerReader([(encode(), first, last)]), BLOCK_SIZE)
        moment = [history.at(number) for number in numbers][-1]
        assert moment is not None
        assert moment.num_tokens == {}
        use = kv_use(moment.blocks, moment.num_tokens, BLOCK_SIZE)
        assert (use.num_unknown, use.num_unused_slots, use.wasted_share) == (1, 0, 0.0)


def test_a_ledger_without_events_and_a_pool_without_holders() -> None:
    ledger = StepLedger()
    ledger.append(0, ["r"], [3], ["prefill"])
    encode, first, last = ledger.flush()  # type: ignore[misc]
    assert PoolHistory(LedgerReader([(encode(), first, last)]), BLOCK_SIZE).at(0) is None
    use = kv_use(BlockMap(PoolState({}, [1])), {}, BLOCK_SIZE)
    assert (use.wasted_share, use.saved_share, use.num_slots) == (None, None, 0)


def test_several_kv_groups() -> None:
    """Ten tokens in two groups of three blocks each; the first block of each is another request's as well."""
    blocks = BlockMap(PoolState({"a": [[1, 2, 3], [4, 5, 6]], "b": [[1], [4]]}, []))
    use = kv_use(blocks, {"a": 10, "b": 4}, BLOCK_SIZE)
    assert (use.num_references, use.num_referenced_blocks, use.num_shared_blocks) == (8, 6, 2)
    assert (use.num_saved_blocks, use.saved_share) == (2, 0.25)
    assert (use.num_unused_slots, use.num_reserved_slots, use.num_slots) == (4, 0, 24)
    assert use.wasted_share == pytest.approx(4 / 24)
