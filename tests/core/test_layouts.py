"""`cache.layout`: contiguous reservations and no cache at all, on the machine that reads back what it was given."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.analysis.memory_waste import memory_waste
from backend.config import EngineConfig
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.kv_layouts import ContiguousKVCacheManager, resolve_layout
from backend.request import Request
from backend.sampling_params import SamplingParams
from tests.core.paged_machine import Lab, generate


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(50_000), k=length)


# ---- contiguous ----


def assert_consecutive(block_ids: list[int]) -> None:
    assert block_ids == list(range(block_ids[0], block_ids[0] + len(block_ids)))


def test_a_reservation_is_one_piece_for_the_longest_request() -> None:
    """Ends in another order than beginnings, and a pool of which the reservations leave 2 blocks over."""
    lab = Lab(layout="contiguous", num_blocks=4 * 5 + 2, block_size=4, max_model_len=20, max_num_seqs=8)
    rng = random.Random(1)
    asked = {str(index): (prompt_of(rng.randint(1, 12), index), rng.randint(1, 8)) for index in range(40)}
    for key, ask in asked.items():
        lab.add(key, *ask)
    most, seen = 0, set()
    while lab.scheduler.has_unfinished_requests():
        lab.step()
        held = lab.manager.snapshot().block_ids
        for (block_ids,) in held.values():
            assert len(block_ids) == 5
            assert_consecutive(block_ids)
            seen.add(block_ids[0])
        most = max(most, len(held))
        assert lab.manager.pool.num_free_blocks == 22 - 5 * len(held)
    assert lab.run() == {key: generate(*ask) for key, ask in asked.items()}
    assert (most, len(seen)) == (4, 4)
    assert not any(step.preempted_request_ids for step in lab.steps)


def test_far_fewer_requests_fit_than_with_blocks_as_needed() -> None:
    """Requests of 5 to 8 tokens where 64 are allowed."""
    running = {}
    for layout in ("paged", "contiguous"):
        lab = Lab(
            layout=layout, num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=64, max_num_batched_tokens=320
        )
        for index in range(64):
            lab.add(str(index), prompt_of(5, index), 4)
        lab.step()
        running[layout] = len(lab.scheduler.running)
        if layout == "contiguous":
            waste = memory_waste([request.num_computed_tokens for request in lab.scheduler.running], 64, 4)
            held = lab.manager.pool.num_referenced_blocks * 4
            assert held == waste.contiguous.reserved
            assert waste.contiguous.wasted_share == 1 - 5 / 64
        lab.run()
    assert running == {"paged": 64 // 2, "contiguous": 64 // 16}


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    num_blocks=st.integers(2, 60),
    length=st.integers(1, 30),
    num_groups=st.integers(1, 2),
    block_size=st.sampled_from([1, 3, 4]),
)
def test_any_order_of_reservations_and_ends_keeps_the_pieces_whole(
    data: st.DataObject, num_blocks: int, length: int, num_groups: int, block_size: int
) -> None:
    groups = [KVGroupSpec(1, 1, 1, 1)] * num_groups
    region = -(-length // block_size) * num_groups
    manager = ContiguousKVCacheManager(num_blocks, block_size, groups, length)
    held: list[Request] = []
    for count in range(data.draw(st.integers(1, 40))):
        if held and data.draw(st.booleans()):
            manager.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            request = Request(str(count), [1] * length, SamplingParams(), frozenset(), 0.0)
            allocation = manager.allocate_slots(request, 1)
            assert (allocation is not None) == (len(held) < num_blocks // region)
            if allocation is not None:
                held.append(request)
                assert request.num_slots >= length
                for blocks in allocation.block_ids:
                    assert_consecutive(blocks)
                more = manager.allocate_slots(request, length)
                assert more is not None
                assert not any(more.block_ids)
        manager.check_integrity()
        assert manager.pool.num_referenced_blocks == region * len(held)


# ---- none ----


def test_without_a_cache_every_step_runs_the_whole_prefix() -> None:
    lab = Lab(layout="none")
    asked = {"a": (prompt_of(7, 1), 5), "b": (prompt_of(1, 2), 3)}
    for key, ask in asked.items():
        lab.add(key, *ask)
    assert lab.run() == {key: generate(*ask) for key, ask in asked.items()}
    # A one-token row goes first in the batch.
    assert [dict(step.num_scheduled_tokens) for step in lab.steps] == [
        {"b": 1, "a": 7},
        {"a": 8, "b": 2},
        {"a": 9, "b": 3},
        {"a": 10},
        {"a": 11},
    ]
    assert all(set(step.num_computed_tokens) == {0} for step in lab.steps)
    assert [set(step.kinds.values()) for step in lab.steps] == [{"prefill"}, *[{"recompute"}] * 4]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=12),
    budget=st.integers(30, 80),
    num_blocks=st.integers(8, 30),
    num_slots=st.integers(1, 6),
    policy=st.sampled_from(["fcfs", "prefill_first", "priority"]),
    batching=st.sampled_from(["continuous", "static"]),
)
def test_what_no_cache_costs_is_the_sum_of_all_prefixes(
    lengths: list[tuple[int, int]], budget: int, num_blocks: int, num_slots: int, policy: str, batching: str
) -> None:
    """Also where budget or pool hold only some of them at a time: nobody computes anything that yields no token."""
    lab = Lab(
        layout="none",
        policy=policy,
        batching=batching,
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=num_slots,
        max_num_batched_tokens=budget,
        max_model_len=30,
    )
    asked = {str(index): (prompt_of(size, index), output) for index, (size, output) in enumerate(lengths)}
    for key, ask in asked.items():
        lab.add(key, *ask, priority=int(key) % 3)
    assert lab.run() == {key: generate(*ask) for key, ask in asked.items()}
    assert sum(step.total_num_scheduled_tokens for step in lab.steps) == sum(
        prompt + done for prompt, output in lengths for done in range(output)
    )
    assert not any(step.preempted_request_ids for step in lab.steps)


def test_requests_that_outgrow_the_budget_take_turns_and_nobody_joins_them() -> None:
    """Two of 14 tokens in a step of 32 grow to 22: from 17 on, only one of them fits."""
    lab = Lab(layout="none", max_num_batched_tokens=32, max_num_seqs=3)
    for key in "ab":
        lab.add(key, prompt_of(14, ord(key)), 8)
    lab.add("c", prompt_of(10), 1)
    lab.run()
    rows = [list(step.num_scheduled_tokens) for step in lab.steps]
    assert rows == [*[["a", "b"]] * 3, *[["a"], ["b"]] * 4, ["a"], ["b", "c"]]
    assert lab.finished.keys() == {"a", "b", "c"}


def test_blocks_are_taken_for_the_step_only() -> None:
    """Two requests of which the pool holds one: as many steps as tokens, and each of them has all the blocks it needs."""
    lab = Lab(layout="none", num_blocks=5, block_size=4, max_num_seqs=2)
    for key in "ab":
        lab.add(key, prompt_of(7, ord(key)), 8)
    while lab.scheduler.has_unfinished_requests():
        lab.step()
        held = lab.manager.snapshot().block_ids
        assert held.keys() <= lab.steps[-1].num_scheduled_tokens.keys()
    assert lab.run() == {key: generate(prompt_of(7, ord(key)), 8) for key in "ab"}


@pytest.mark.parametrize("when", ["waiting", "running", "left out"])
def test_abort_without_a_cache(when: str) -> None:
    lab = Lab(layout="none", max_num_batched_tokens=32, max_num_seqs=1 if when == "waiting" else 2)
    for key in "ab":
        lab.add(key, prompt_of(14, ord(key)), 8)
    for _ in range(4 if when == "left out" else 2):
        lab.step()
    assert (when == "running") == ("b" in lab.steps[-1].num_scheduled_tokens)
    output = lab.scheduler.abort_request("b")
    assert output is not None
    lab.take(output)
    lab.add("b2", prompt_of(5), 3)
    tokens = lab.run()
    assert (tokens["a"], tokens["b2"]) == (generate(prompt_of(14, ord("a")), 8), generate(prompt_of(5), 3))


# ---- what a layout turns off ----


def resolved(**overrides: Any) -> tuple[EngineConfig, tuple[str, ...]]:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return resolve_layout(
        EngineConfig().resolve(device="cuda", max_model_len=2048).with_overrides({"cache.num_blocks": 100} | dotted)
    )


def test_the_paged_layout_changes_nothing() -> None:
    config, notices = resolved()
    assert (config.cache.enable_prefix_caching, config.scheduler.async_scheduling, notices) == (True, True, ())


def test_a_contiguous_cache_has_no_prefix_cache_and_says_so_once() -> None:
    config, notices = resolved(cache__layout="contiguous")
    assert (config.cache.enable_prefix_caching, config.scheduler.async_scheduling) == (False, True)
    assert notices == ("cache.enable_prefix_caching is off: nothing is shared with cache.layout = 'contiguous'.",)
    config, notices = resolved(cache__layout="contiguous", cache__enable_prefix_caching=False)
    assert (config.cache.enable_prefix_caching, notices) == (False, ())


def test_no_cache_is_synchronous_and_cuts_requests_to_what_a_step_runs() -> None:
    config, notices = resolved(cache__layout="none", scheduler__max_num_batched_tokens=512)
    assert (config.cache.enable_prefix_caching, config.scheduler.async_scheduling) == (False, False)
    assert config.model.max_model_len == 513
    assert [notice.split()[0] for notice in notices] == [
        "cache.enable_prefix_caching",
        "scheduler.async_scheduling",
        "model.max_model_len",
    ]
    assert "513 tokens instead of 2,048" in notices[2]
    assert "scheduler.max_num_batched_tokens = 512" in notices[2]
    plain = {"cache__enable_prefix_caching": False, "scheduler__async_scheduling": False}
    assert resolved(cache__layout="none", scheduler__max_num_batched_tokens=2047, **plain)[1] == ()


def test_the_longest_request_without_a_cache_fills_the_budget_in_its_last_step() -> None:
    lab = Lab(layout="none", max_num_batched_tokens=16, num_blocks=64)
    prompt = prompt_of(10)
    lab.add("a", prompt, 50)
    assert lab.run()["a"] == generate(prompt, 7)
    assert lab.steps[-1].num_scheduled_tokens == {"a": 16}
    assert lab.finished["a"] == "length"


# ---- all of them ----


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    layout=st.sampled_from(["paged", "contiguous", "none"]),
    policy=st.sampled_from(["fcfs", "prefill_first", "priority"]),
    batching=st.sampled_from(["continuous", "static"]),
    num_blocks=st.integers(8, 30),
    budget=st.integers(1, 40),
    num_slots=st.integers(1, 6),
    ahead=st.integers(0, 2),
)
def test_every_baseline_gives_the_same_tokens(
    seed: int, layout: str, policy: str, batching: str, num_blocks: int, budget: int, num_slots: int, ahead: int
) -> None:
    """Requests come while others run, some are aborted; the pool is whole after every step, and everything ends."""
    rng = random.Random(seed)
    lab = Lab(
        layout=layout,
        policy=policy,
        batching=batching,
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=num_slots,
        max_num_batched_tokens=max(32, budget) if layout == "none" else budget,
        max_model_len=32,
        ahead=0 if layout == "none" else ahead,
        prefix_caching=layout == "paged",
    )
    asked = {str(index): (prompt_of(rng.randint(1, 20), index), rng.randint(1, 12)) for index in range(12)}
    for key, ask in asked.items():
        lab.add(key, *ask, priority=rng.randint(0, 3))
        for _ in range(rng.randint(0, 3)):
            lab.step()
        if lab.scheduler.requests and rng.random() < 0.15:
            output = lab.scheduler.abort_request(rng.choice(list(lab.scheduler.requests)))
            assert output is not None
            lab.take(output)
    for key, tokens in lab.run().items():
        expected = generate(*asked[key])
        assert tokens == (expected[: len(tokens)] if lab.finished[key] == "abort" else expected)
