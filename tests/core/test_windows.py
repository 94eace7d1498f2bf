"""KV groups with a window: what is behind it is given back, and nobody misses it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.core.admission import fits
from backend.core.block_hash import prefix_key
from backend.core.block_pool import NULL_BLOCK
from backend.core.kv_cache_manager import KVCacheManager
from backend.core.kv_groups import MAX_GROUPS, KVGroupSpec, group_layers
from backend.core.kv_windows import KVWindows
from backend.request import Request, sample_ids
from backend.sampling_params import SamplingParams, sample_seed
from tests.core.paged_machine import VOCAB, Lab, generate

WINDOWS = [(5,), (None, 5), (None, 6, 6)]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCAB), k=length)


def held_by(lab: Lab, request_id: str) -> list[list[int]]:
    """Per group, without what is behind a window."""
    return [[block for block in blocks if block] for blocks in lab.manager.snapshot().block_ids[request_id]]


# ---- how many blocks a request holds ----


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("block_size", "window"), [(1, 1), (1, 7), (4, 7), (4, 8), (4, 9), (16, 5), (16, 40)])
def test_a_generation_of_ten_windows_holds_as_many_blocks_as_one(block_size: int, window: int, ahead: int) -> None:
    """A window that begins anywhere in a block: ceil((window - 1) / block_size) + 1 blocks, counted slot by slot."""
    lab = Lab(num_blocks=200, block_size=block_size, windows=(window,), ahead=ahead, max_model_len=500)
    lab.add("a", prompt_of(1), max_tokens=10 * window + 2 * block_size)
    counts = []
    while lab.scheduler.has_unfinished_requests():
        lab.step()
        if "a" in lab.manager.snapshot().block_ids:
            counts.append(len(held_by(lab, "a")[0]))
    most = -(-(window - 1) // block_size) + 1
    assert set(counts[window + block_size :]) <= {most, most - 1}
    assert (max(counts), len(counts) >= 10 * window - 1) == (most, True)
    assert lab.tokens["a"] == generate(prompt_of(1), 10 * window + 2 * block_size, windows=(window,))
    assert lab.manager.pool.num_free_blocks == 200


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("budget", [1, 3, 8, 64])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_request_never_holds_more_than_is_counted_for_it(
    block_size: int, budget: int, windows: tuple[int | None, ...]
) -> None:
    """The bound of the design: ceil((window - 1 + chunk) / block_size) + 1, in prompts and decodes of any chunks."""
    lab = Lab(num_blocks=300, block_size=block_size, windows=windows, max_num_batched_tokens=budget, max_model_len=90)
    for index, length in enumerate((1, 4, 5, 6, 33, 70)):
        lab.add(str(index), prompt_of(length), max_tokens=20)
    while lab.scheduler.has_unfinished_requests():
        lab.step()
        for key in lab.manager.snapshot().block_ids:
            held, num_tokens = held_by(lab, key), lab.scheduler.requests[key].num_computed_tokens
            for blocks, window in zip(held, windows, strict=True):
                if window:
                    assert len(blocks) <= -(-(window - 1 + budget) // block_size) + 1
            assert sum(map(len, held)) <= lab.manager.blocks_needed(num_tokens)


def test_a_pool_of_one_window_serves_a_request_of_any_length() -> None:
    """And two at once, one after the other; a block less holds no such request."""
    window, block_size, budget = 8, 4, 4
    needs = KVWindows([window], block_size, budget)
    most = -(-(window - 1 + budget) // block_size) + 1
    assert needs.longest_request(most, 10_000) == 10_000
    assert needs.longest_request(most - 1, 10_000) == (most - 1) * block_size
    lab = Lab(
        num_blocks=most, block_size=block_size, windows=(window,), max_num_batched_tokens=budget, max_model_len=400
    )
    prompts = {key: prompt_of(150, ord(key)) for key in "ab"}
    for key, prompt in prompts.items():
        lab.add(key, prompt, max_tokens=100)
    assert lab.run() == {key: generate(prompt, 100, windows=(window,)) for key, prompt in prompts.items()}


def test_who_is_admitted_counts_windows_and_not_lengths() -> None:
    """Eight prompts of 200 tokens, each with at most 6 blocks of a window of 16, run at once in 48 blocks of 4."""
    lab = Lab(num_blocks=48, block_size=4, windows=(16,), max_num_batched_tokens=8, max_num_seqs=8, max_model_len=300)
    assert lab.manager.blocks_needed(200) == 7
    for index in range(8):
        lab.add(str(index), prompt_of(200, index), max_tokens=60)
    most = 0
    while lab.scheduler.has_unfinished_requests():
        lab.step()
        most = max(most, len(lab.scheduler.running))
    assert most >= 6
    assert lab.tokens == {str(index): generate(prompt_of(200, index), 60, windows=(16,)) for index in range(8)}


@pytest.mark.parametrize("num_blocks", [6, 7])
def test_shared_blocks_are_no_room_for_what_comes_behind_them(num_blocks: int) -> None:
    """It begins with two blocks of the other's, and gives them back on its way, while it needs four of its own."""
    lab = Lab(
        num_blocks=num_blocks,
        block_size=4,
        windows=(8,),
        prefix_caching=True,
        max_num_batched_tokens=4,
        max_model_len=400,
    )
    prompt = prompt_of(9)
    lab.add("a", prompt, max_tokens=40)
    for _ in range(3):
        lab.step()
    assert len(held_by(lab, "a")[0]) == 3
    request = Request("b", prompt[:8] + prompt_of(200), SamplingParams(), frozenset(), 0.0)
    computed = lab.manager.get_computed_blocks(request)
    assert computed.num_tokens == 8
    assert fits(lab.manager, request, computed, owed=0) == (num_blocks == 7)


# ---- prefix cache ----


@given(data=st.data(), block_size=st.integers(1, 5))
def test_the_longest_hit_against_trying_every_one(data: st.DataObject, block_size: int) -> None:
    windows = data.draw(st.lists(st.none() | st.integers(1, 14), min_size=1, max_size=3))
    num_blocks = data.draw(st.integers(0, 7))
    found = [
        data.draw(st.lists(st.sampled_from([None, 3, 8]), min_size=num_blocks, max_size=num_blocks)) for _ in windows
    ]

    def serves(hit: int) -> bool:
        """Every position that the first token behind the hit sees is in a block that is found."""
        position = hit * block_size
        return all(
            blocks[seen // block_size] is not None
            for blocks, window in zip(found, windows, strict=True)
            for seen in range(max(0, position - window + 1) if window else 0, position)
        )

    hits = [hit for hit in range(num_blocks + 1) if serves(hit)]
    assert KVWindows(windows, block_size).longest_hit(found) == max(hits)


def test_a_prefix_is_found_though_its_beginning_is_gone() -> None:
    """Of 40 tokens in blocks of 4, a window of 8 needs the last two or three blocks only."""
    lab = Lab(num_blocks=30, block_size=4, windows=(8,), prefix_caching=True, max_model_len=100)
    prompt = prompt_of(41)
    lab.add("a", prompt, max_tokens=1)
    lab.run()
    cached = lab.manager.get_computed_blocks(Request("b", prompt, SamplingParams(), frozenset(), 0.0))
    assert (cached.num_tokens, [bool(block) for block in cached.block_ids[0]]) == (40, [False] * 8 + [True] * 2)
    needed = cached.block_ids[0][8:]
    for block_id in set(lab.manager.pool.cached_blocks()) - set(needed):
        lab.manager.pool.uncache([block_id])
    again = lab.add("b", prompt, max_tokens=30)
    assert lab.run()["b"] == generate(prompt, 30, windows=(8,))
    assert again.num_cached_tokens == 40
    # Without the last one of them, the best that is left ends before it; that one lacks its own window.
    lab.manager.reset_prefix_cache()
    lab.add("c", prompt, max_tokens=1)
    lab.run()
    found = lab.manager.get_computed_blocks(Request("d", prompt, SamplingParams(), frozenset(), 0.0)).block_ids[0]
    lab.manager.pool.uncache(found[-1:])
    fewer = lab.manager.get_computed_blocks(Request("d", prompt, SamplingParams(), frozenset(), 0.0))
    assert fewer.num_tokens == 36


def test_a_hit_of_two_groups_is_what_both_have() -> None:
    lab = Lab(num_blocks=60, block_size=4, windows=(None, 6), prefix_caching=True, max_model_len=100)
    prompt = prompt_of(30)
    lab.add("a", prompt, max_tokens=1)
    lab.run()
    probe = Request("b", prompt, SamplingParams(), frozenset(), 0.0)
    full, sliding = lab.manager.get_computed_blocks(probe).block_ids
    assert (len(full), sliding.count(NULL_BLOCK)) == (7, (28 - 6 + 1) // 4)
    lab.manager.pool.uncache([full[5]])
    assert lab.manager.get_computed_blocks(probe).num_tokens == 20
    lab.add("b", prompt, max_tokens=9)
    assert lab.run()["b"] == generate(prompt, 9, windows=(None, 6))


def test_what_a_damaged_request_has_given_back_is_not_found_either() -> None:
    lab = Lab(num_blocks=40, block_size=2, windows=(3,), prefix_caching=True, max_num_batched_tokens=4)
    prompt = prompt_of(12)
    lab.fail_at["a"] = 12
    lab.add("a", prompt, max_tokens=4)
    lab.run()
    assert lab.finished == {"a": "error"}
    assert lab.manager.pool.num_cached_blocks == 0


# ---- everything at once ----


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(
    ("layout", "swap_blocks", "batching", "ahead"),
    [
        ("paged", 0, "continuous", 0),
        ("paged", 0, "static", 2),
        ("paged", 100, "continuous", 2),
        ("paged", 14, "continuous", 0),
        ("contiguous", 0, "continuous", 1),
        ("none", 0, "continuous", 0),
    ],
)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_random_traffic(
    prefix_caching: bool, layout: str, swap_blocks: int, batching: str, ahead: int, windows: tuple[int | None, ...]
) -> None:
    """Samples, shared beginnings, chunks, preemption, aborts: every token is that of a request by itself."""
    rng = random.Random(f"{windows}/{swap_blocks}/{prefix_caching}")
    seen: Counter[str] = Counter()
    for block_size, budget in ((2, 5), (4, 3), (1, 64)):
        budget = budget if layout == "paged" else 64
        kept = [None if layout == "contiguous" else window for window in windows]
        lab = Lab(
            num_blocks=KVWindows(kept, block_size, budget).peak_blocks(24) + 2,  # little more than the longest takes
            block_size=block_size,
            max_num_seqs=5,
            max_num_batched_tokens=budget,
            max_model_len=24,
            ahead=ahead,
            prefix_caching=prefix_caching and layout == "paged",
            batching=batching,
            layout=layout,
            swap_blocks=swap_blocks,
            windows=windows,
        )
        expected: dict[str, list[int]] = {}
        stem = prompt_of(12)
        for index in range(10):
            prompt = stem[: rng.choice([0, 6, 12])] + prompt_of(rng.randint(1, 6), index)
            counts = [min(rng.choice([1, 4, 20]), 24 - len(prompt)) for _ in range(rng.choice([1, 1, 2, 4]))]
            lab.add_samples(str(index), prompt, len(counts), counts, seed=index)
            for place, (key, count) in enumerate(zip(sample_ids(str(index), len(counts)), counts, strict=True)):
                expected[key] = generate(prompt, count, sample_seed(index, place), windows)
            for _ in range(rng.choice([0, 1, 3, 9])):
                if lab.scheduler.has_unfinished_requests():
                    lab.step()
                if lab.scheduler.requests and rng.random() < 0.05:
                    lab.abort(rng.choice(list(lab.scheduler.requests)))
        lab.run()
        for key, reason in lab.finished.items():
            whole = len(expected[key]) if reason == "length" else len(lab.tokens[key])
            assert lab.tokens[key] == expected[key][:whole]
        assert lab.finished.keys() == expected.keys()
        seen["preempted"] += sum(len(step.preempted_request_ids) for step in lab.steps)
        seen["swapped"] += sum(step.num_swapped for step in lab.steps)
        seen["copied"] += sum(len(step.block_copies) for step in lab.steps)
    assert seen["copied"] or layout != "paged"
    assert seen["preempted"] or layout != "paged" or batching == "static"
    assert seen["swapped"] or not swap_blocks


# ---- groups of layers ----


@given(num_full=st.integers(0, 60), num_sliding=st.integers(0, 60), seed=st.integers(0, 5))
def test_layers_are_cut_into_few_groups_of_one_size_with_the_least_padding(
    num_full: int, num_sliding: int, seed: int
) -> None:
    windows: list[int | None] = [*[None] * num_full, *[7] * num_sliding] or [None]
    random.Random(seed).shuffle(windows)
    groups = group_layers(windows)
    size = max(len(group.layers) for group in groups)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert [group.window for group in groups] == sorted((group.window for group in groups), key=lambda w: w or 0)
    assert len(groups) <= MAX_GROUPS
    by_size = [
        other * count
        for other in range(1, 61)
        if (count := -(-windows.count(None) // other) + -(-windows.count(7) // other)) <= MAX_GROUPS
    ]
    assert size * len(groups) == min(by_size)


def test_a_model_whose_layers_are_alike_is_one_group_and_two_equal_kinds_are_two() -> None:
    assert group_layers([9] * 32) == ((9, tuple(range(32))),)
    assert group_layers([None, 9, None, 9]) == ((None, (0, 2)), (9, (1, 3)))
    assert [len(group.layers) for group in group_layers([None] * 21 + [9] * 7)] == [7] * 4


def test_integrity_sees_a_table_that_lost_a_block_within_its_window() -> None:
    manager = KVCacheManager(20, 2, [KVGroupSpec(1, 1, 1, 1, window=4)], prefix_key(model="m"))
    request = Request("a", prompt_of(9), SamplingParams(), frozenset(), 0.0)
    assert manager.allocate_slots(request, 9) is not None
    table = manager._block_ids["a"][0]
    manager.pool.free([table[2]])
    table[2] = NULL_BLOCK
    with pytest.raises(RuntimeError, match="tables of request a"):
        manager.check_integrity()
