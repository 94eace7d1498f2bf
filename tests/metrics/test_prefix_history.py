"""Which blocks could be found when: with samples, host memory and windows, and over chunks of a ledger."""

from __future__ import annotations

import random

import pytest

from backend.core.block_hash import prefix_key
from backend.core.kv_cache_manager import KVCacheManager, KVGroupSpec
from backend.core.output import SchedulerOutput
from backend.metrics.ledger import StepLedger
from backend.metrics.ledger_reader import LedgerReader
from backend.metrics.prefix_history import NEVER, PrefixHistory
from backend.request import Request
from backend.sampling_params import SamplingParams
from tests.core.paged_machine import VOCAB
from tests.metrics.prefix_traffic import WatchedLab, random_lab


def history_of(ledger: StepLedger, block_size: int) -> PrefixHistory:
    chunk = ledger.flush()
    assert chunk is not None
    history = PrefixHistory(block_size)
    assert history.extend(LedgerReader([(chunk.encode(), chunk.first_step, chunk.last_step)]))
    return history


@pytest.mark.parametrize("seed", range(3))
def test_what_can_be_found_in_the_end_is_what_the_pool_has_cached(seed: int) -> None:
    """Samples that fork and copy, and requests that leave for host memory, among others."""
    rng = random.Random(seed)
    settings = {"num_blocks": 26, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24, "swap_blocks": 60}
    lab = WatchedLab(**settings, watched=False)  # type: ignore[arg-type]
    stems = [rng.choices(range(VOCAB), k=20) for _ in range(2)]
    alone = []
    for index in range(50):
        prompt = rng.choice(stems)[: rng.randint(1, 20)] + rng.choices(range(3), k=rng.randint(0, 5))
        if rng.random() < 0.3:
            lab.add_samples(f"s{index}", prompt, 3, [rng.randint(1, 9) for _ in range(3)])
        else:
            alone.append(lab.add(str(index), prompt, max_tokens=rng.randint(1, 20)))
        for _ in range(rng.randint(0, 2)):
            lab.step()
    lab.run()
    assert any(step.num_swapped for step in lab.steps)
    assert any(step.block_copies for step in lab.steps)
    lab.ledger.append(lab.num_steps, [], [], [], lab.manager.take_events())  # what came behind the last step
    history = PrefixHistory(4)
    assert history.extend(lab.reader())
    assert sum(life.end == NEVER for life in history.lives) == len(lab.manager.state().cached) > 0
    for request in alone:
        assert history.admissions[request.request_id].num_found * 4 == request.num_cached_tokens
    forked = [key for key, admission in history.admissions.items() if admission.is_forked]
    assert forked
    assert all("/" in key for key in forked)


def test_growing_chunk_by_chunk_is_reading_at_once() -> None:
    lab = random_lab(3)
    whole = lab.cache().history
    chunks = [(chunk.encode(), chunk.first_step, chunk.last_step) for chunk in lab.chunks]
    growing = PrefixHistory(lab.block_size)
    for end in range(len(chunks) + 1):
        assert growing.extend(LedgerReader(chunks[:end]))
    assert list(growing.admissions) == list(whole.admissions)
    assert [(life.owner, life.begin, life.end, life.how) for life in growing.lives] == [
        (life.owner, life.begin, life.end, life.how) for life in whole.lives
    ]
    assert growing.ends == whole.ends


def test_blocks_behind_a_window_are_nobodys_and_found_without_them() -> None:
    groups = [KVGroupSpec(1, 1, 1, 1), KVGroupSpec(1, 1, 1, 1, window=8)]
    manager = KVCacheManager(60, 4, groups, prefix_key(model="m"))
    manager.log_events(True)
    ledger = StepLedger()

    def run(request: Request, num_tokens: int) -> None:
        assert manager.allocate_slots(request, num_tokens) is not None
        request.num_computed_tokens += num_tokens
        manager.cache_blocks(request)
        step = ledger.num_steps
        frame = manager.state() if not step else None
        ledger.append(step, [request.request_id], [num_tokens], ["prefill"], manager.take_events(), frame)

    requests = [Request(key, list(range(33)), SamplingParams(), frozenset(), 0.0) for key in "ab"]
    for request in requests:
        manager.take_computed_blocks(request, manager.get_computed_blocks(request))
        while request.num_computed_tokens < 32:
            run(request, 16)
        run(request, 1)
    manager.check_integrity()
    history = history_of(ledger, 4)
    admission = history.admissions["b"]
    assert admission.num_found * 4 == 32 == requests[1].num_computed_tokens - 1
    assert history.sliding == {1}
    keeping, sliding = admission.found
    assert [life and (life.owner, life.index) for life in keeping] == [("a", index) for index in range(8)]
    held = manager.state().held["b"]
    assert [life is None for life in sliding] == [block == 0 for block in held[1][:8]]
    assert None in sliding


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)])
@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_begins_among_others_knows_where_every_block_is(seed: int, windows: tuple[int | None, ...]) -> None:
    """Requests from before go on in it and end in it; the map is the pool's at every step, and owners held their blocks.

    A naive watcher notes for each block that becomes findable where it is in the tables of who holds it.
    """
    rng = random.Random(seed)
    lab = WatchedLab(
        num_blocks=60,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=60,
        swap_blocks=20 if windows == (None,) else 0,
        windows=windows,
        watched=False,
    )
    places: list[set[tuple[str, int, int]]] = []  # of each block when it can be found: of all its holders
    pools, tokens = [], []

    def noted(request: Request) -> None:
        before = set(lab.manager.pool.cached_blocks())
        cache_blocks(request)
        held = lab.manager.state().held
        for block_id in [block_id for block_id in lab.manager.pool.cached_blocks() if block_id not in before]:
            places.append(
                {
                    (key, group, blocks.index(block_id))
                    for key, groups in held.items()
                    for group, blocks in enumerate(groups)
                    if block_id in blocks
                }
            )

    cache_blocks = lab.manager.cache_blocks
    carry_out = lab._carry_out

    def carried_out(scheduled: SchedulerOutput) -> None:
        state = lab.manager.state(lab.scheduler.requests)
        pools.append((state.held, set(state.cached)))
        tokens.append(state.num_tokens)
        carry_out(scheduled)

    stems = [rng.choices(range(VOCAB), k=20) for _ in range(2)]
    for index in range(50):
        if index == 15:
            lab.manager.take_events()
            lab.ledger, lab.chunks, lab.num_steps = StepLedger(), [], 0
            lab.manager.cache_blocks = noted  # type: ignore[method-assign]
            lab._carry_out = carried_out  # type: ignore[method-assign]
            from_before = set(lab.manager.state().held)
            assert from_before
        prompt = rng.choice(stems)[: rng.randint(1, 20)] + rng.choices(range(3), k=rng.randint(0, 5))
        lab.add_samples(f"{index}", prompt, 3, [rng.randint(1, 30) for _ in range(3)])
        for _ in range(rng.randint(1, 3)):
            lab.step()
    lab.run()

    history = PrefixHistory(4)
    chunks = [(chunk.encode(), chunk.first_step, chunk.last_step) for chunk in lab.chunks]
    for number in range(len(chunks)):
        assert history.extend(LedgerReader(chunks[: number + 1]))
        last = chunks[number][2]
        assert (history.held, history.cached) == pools[last]
        assert history.num_tokens == tokens[last]
    born = [life for life in history.lives if life.begin]
    assert len(born) > 50
    for life, where in zip(born, places, strict=False):  # some of them after the last step
        # In the first step, of a block that only requests from before hold, nobody knows whose it is.
        is_unknown = life.begin_step == 0 and life.owner is None and {key for key, _, _ in where} <= from_before
        assert is_unknown or (life.owner, life.group, life.index) in where
    assert {life.owner for life in born} & from_before, "some of them were of requests from before"
