"""Preemption by swapping: the KV comes back as it was, nothing is computed twice, and a full host falls back."""

from __future__ import annotations

import random

import pytest

from backend.core.block_pool import NULL_BLOCK
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.swap_space import SwapSpace
from backend.core.swapping import SwappingKVCacheManager
from backend.request import Request, sample_ids
from backend.sampling_params import SamplingParams, sample_seed
from tests.core.paged_machine import VOCAB, Lab, generate


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCAB), k=length)


def crowd(lab: Lab, num_requests: int = 6, max_tokens: int = 20) -> dict[str, list[int]]:
    """Requests that outgrow a small pool; what each should give."""
    prompts = {str(index): prompt_of(6 + index, index) for index in range(num_requests)}
    for key, prompt in prompts.items():
        lab.add(key, prompt, max_tokens=max_tokens)
    return {key: generate(prompt, max_tokens) for key, prompt in prompts.items()}


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_no_token_runs_twice(batching: str, ahead: int, prefix_caching: bool) -> None:
    lab = Lab(
        num_blocks=12, block_size=4, ahead=ahead, prefix_caching=prefix_caching, batching=batching, swap_blocks=100
    )
    expected = crowd(lab)
    states: set[str] = set()
    while lab.scheduler.has_unfinished_requests():
        lab.step()
        states |= {request.status for request in lab.scheduler.waiting}
    assert lab.run() == expected
    assert "swapped" in states
    assert "preempted" not in states
    assert sum(step.num_swapped for step in lab.steps) == sum(len(step.preempted_request_ids) for step in lab.steps) > 0
    assert {kind for step in lab.steps for kind in step.kinds.values()} == {"prefill", "decode"}
    ran = sum(step.total_num_scheduled_tokens for step in lab.steps)
    assert ran == sum(6 + index + 19 for index in range(6))
    for step in lab.steps:
        assert not (step.swapped_out and (step.swapped_in or step.block_copies or step.new_requests))


def test_a_full_host_falls_back_to_computing_again() -> None:
    lab = Lab(num_blocks=12, block_size=4, swap_blocks=3)
    expected = crowd(lab)
    assert lab.run() == expected
    preempted = sum(len(step.preempted_request_ids) for step in lab.steps)
    assert 0 < sum(step.num_swapped for step in lab.steps) < preempted
    assert "recompute" in {kind for step in lab.steps for kind in step.kinds.values()}


@pytest.mark.parametrize("ahead", [0, 1])
def test_one_that_waits_in_host_memory_is_aborted(ahead: int) -> None:
    lab = Lab(num_blocks=12, block_size=4, ahead=ahead, swap_blocks=100)
    expected = crowd(lab)
    while not any(request.status == "swapped" for request in lab.scheduler.waiting):
        lab.step()
    key = next(request.request_id for request in lab.scheduler.waiting if request.status == "swapped")
    lab.abort(key)
    lab.run()
    assert lab.finished[key] == "abort"
    assert 0 < len(lab.tokens[key]) < 20
    expected[key] = expected[key][: len(lab.tokens[key])]
    assert lab.tokens == expected


def test_samples_and_cached_beginnings_go_out_once_and_come_back_shared() -> None:
    """Two samples of a prompt of four full blocks: the second one's copy adds its own blocks only."""
    for prefix_caching in (False, True):
        lab = Lab(num_blocks=64, block_size=4, prefix_caching=prefix_caching, swap_blocks=100)
        prompt = prompt_of(18)
        requests = lab.add_samples("a", prompt, 2, [20, 20], seed=3)
        for _ in range(4):
            lab.step()
        manager = lab.manager
        assert isinstance(manager, SwappingKVCacheManager)
        copied = []
        sizes = [-(-request.num_computed_tokens // 4) for request in requests]
        for request in requests:
            copied.append(len(manager.swap_out(request) or ()))
            manager.check_integrity()
        assert copied == [sizes[0], sizes[1] - 4]
        assert manager.swap_space.num_free_blocks == 100 - sum(copied)


def test_what_the_prefix_cache_still_has_is_not_copied_back() -> None:
    lab = Lab(num_blocks=12, block_size=4, prefix_caching=True, max_num_seqs=2, swap_blocks=100)
    first = lab.add("a", prompt_of(17), max_tokens=16)
    lab.add("b", prompt_of(13, 1), max_tokens=16)
    while first.num_preemptions + lab.scheduler.requests["b"].num_preemptions == 0:
        lab.step()
    out = sum(len(step.swapped_out) for step in lab.steps)
    lab.run()
    back = sum(len(step.swapped_in) for step in lab.steps)
    assert 0 < back < out, "the pool is large enough to keep some of them"
    assert lab.tokens == {"a": generate(prompt_of(17), 16), "b": generate(prompt_of(13, 1), 16)}


@pytest.mark.parametrize("layout", ["contiguous", "none"])
def test_where_nobody_is_preempted_nothing_is_reserved(layout: str) -> None:
    lab = Lab(layout=layout, num_blocks=64, max_model_len=40, swap_blocks=10)
    assert not isinstance(lab.manager, SwappingKVCacheManager)
    expected = crowd(lab)
    assert lab.run() == expected


def test_a_space_that_is_too_small_changes_nothing() -> None:
    space = SwapSpace(3)
    assert space.put("a", 8, [[5, 6]], [[b"x"]]) == [(5, 0), (6, 1)]
    assert space.put("b", 12, [[5, 7, 8]], [[b"x"]]) is None
    space.check_integrity()
    assert space.num_tokens_of("b") == 0
    assert space.put("b", 8, [[9, 7]], [[b"x"]]) == [(7, 2)], "what is there already is not copied"
    assert (space.num_tokens_of("b"), space.num_free_blocks) == (8, 0)
    space.drop("a")
    space.check_integrity()
    assert space.num_free_blocks == 1
    assert space.take("b") == [[0, 2]]
    assert space.num_free_blocks == 3
    space.drop("b")
    space.check_integrity()


def test_two_groups_of_layers_swap_their_own_blocks() -> None:
    groups = [KVGroupSpec(1, 1, 1, 1), KVGroupSpec(2, 1, 1, 1, window=8)]
    manager = SwappingKVCacheManager(40, 4, groups, b"key", 40)
    request = Request("a", prompt_of(13), SamplingParams(), frozenset(), 0.0)
    manager.take_computed_blocks(request, manager.get_computed_blocks(request))
    assert manager.allocate_slots(request, 13) is not None
    request.num_computed_tokens = 13
    manager.cache_blocks(request)
    request.token_ids.append(7)
    out = manager.swap_out(request)
    assert out is not None
    assert [block for block, _ in out] == [1, 2, 3, 4, 6, 7, 8], (
        "the second group's first block is behind the window of 8"
    )
    manager.reset_prefix_cache()
    request.num_computed_tokens = 0
    computed = manager.get_computed_blocks(request)
    assert (computed.origin, computed.num_tokens) == ("swap", 13)
    back = manager.take_computed_blocks(request, computed)
    assert [host for host, _ in back] == [host for _, host in out]
    first, second = manager.block_ids_of(request)
    assert second[0] == NULL_BLOCK
    assert [block for _, block in back] == first + second[1:]
    manager.check_integrity()


@pytest.mark.parametrize("ahead", [0, 2])
def test_samples_in_a_pool_that_runs_out(ahead: int) -> None:
    lab = Lab(num_blocks=14, block_size=4, ahead=ahead, swap_blocks=100)
    prompt = prompt_of(14)
    lab.add_samples("a", prompt, 5, [20] * 5, seed=9)
    lab.run()
    keys = sample_ids("a", 5)
    assert lab.tokens == {key: generate(prompt, 20, sample_seed(9, index)) for index, key in enumerate(keys)}
    assert sum(step.num_swapped for step in lab.steps) > 0
    assert sum(step.total_num_scheduled_tokens for step in lab.steps) == 14 + 4 + 5 * 19
