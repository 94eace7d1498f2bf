"""Any step of a stored ledger, against the scheduler and pool that it was written from."""

from __future__ import annotations

import random

import pytest

from backend.core.block_events import PoolState
from backend.errors import DatabaseError
from backend.metrics.ledger import KEY_FRAME_STEPS, StepLedger
from backend.metrics.ledger_format import LedgerEntry, LedgerStep
from backend.metrics.ledger_reader import LedgerReader, step_to_dict
from tests.core.paged_machine import VOCAB, Lab

NUM_STEPS = 2 * KEY_FRAME_STEPS + 40


@pytest.fixture(scope="module")
def written() -> tuple[LedgerReader, list[PoolState], list[dict[str, int]]]:
    """The reader, the pool after the schedule of each step, and the tokens scheduled in each."""
    rng = random.Random(5)
    lab = Lab(num_blocks=40, block_size=4, max_num_seqs=4, prefix_caching=True)
    lab.manager.log_events(True)
    ledger, states, tokens, chunks = StepLedger(), [], [], []
    stem = rng.choices(range(VOCAB), k=30)

    def keep(chunk: object) -> None:
        if chunk is not None:
            encode, first, last = chunk  # type: ignore[misc]
            chunks.append((encode(), first, last))

    for number in range(NUM_STEPS):
        while len(lab.scheduler.requests) < 5:
            prompt = stem[: rng.randint(1, 30)] + rng.choices(range(VOCAB), k=3)
            lab.add(f"{number}/{rng.random()}", prompt, max_tokens=rng.randint(1, 30))
        scheduled = lab.scheduler.schedule()
        state = lab.manager.state()
        states.append(state)
        rows = scheduled.num_scheduled_tokens
        tokens.append(dict(rows))
        frame = state if number % KEY_FRAME_STEPS == 0 else None
        keep(ledger.append(number, rows, rows.values(), scheduled.kinds.values(), lab.manager.take_events(), frame))
        if rng.random() < 0.1:
            keep(ledger.flush())  # as after half a second
        for output in lab.scheduler.update_from_output(scheduled, lab.machine.execute(scheduled)):
            lab.take(output)
    keep(ledger.flush())
    assert len(chunks) > 20
    return LedgerReader(chunks), states, tokens


def test_every_step_in_any_order(written: tuple[LedgerReader, list[PoolState], list[dict[str, int]]]) -> None:
    reader, states, tokens = written
    assert reader.steps == range(NUM_STEPS)
    for number in random.Random(0).sample(range(NUM_STEPS), 150):
        step = reader.step(number)
        assert step.step == number
        assert {entry.request_id: entry.num_scheduled_tokens for entry in step.entries} == tokens[number]
        block_map = reader.block_map(number)
        assert block_map is not None
        assert (block_map.held, block_map.cached) == (states[number].held, set(states[number].cached))
    assert [step.step for step in reader.read(250, 260)] == list(range(250, 261))
    assert [step.step for step in reader.read(NUM_STEPS - 2, NUM_STEPS + 50)] == [NUM_STEPS - 2, NUM_STEPS - 1]


@pytest.mark.parametrize("number", [-1, NUM_STEPS])
def test_a_step_that_is_not_there_is_named(
    written: tuple[LedgerReader, list[PoolState], list[dict[str, int]]], number: int
) -> None:
    with pytest.raises(DatabaseError, match=rf"step {number} is not in the step ledger; steps: 0 to {NUM_STEPS - 1}"):
        written[0].block_map(number)


def test_no_ledger_and_one_without_events() -> None:
    assert LedgerReader([]).steps == range(0)
    with pytest.raises(DatabaseError, match="steps: none"):
        LedgerReader([]).step(0)
    ledger = StepLedger()
    ledger.append(0, ["r"], [3], ["prefill"])
    encode, first, last = ledger.flush()  # type: ignore[misc]
    reader = LedgerReader([(encode(), first, last)])
    assert reader.step(0) == LedgerStep(0, (LedgerEntry("r", 3, "prefill"),))
    assert reader.block_map(0) is None


def test_plain_data(written: tuple[LedgerReader, list[PoolState], list[dict[str, int]]]) -> None:
    document = step_to_dict(written[0].step(0))
    assert set(document) == {"step", "requests", "events"}
    assert document["requests"][0].keys() == {"request_id", "num_scheduled_tokens", "kind"}
    assert document["events"][0].keys() == {"kind", "request_id", "group", "block_ids", "num_tokens"}
