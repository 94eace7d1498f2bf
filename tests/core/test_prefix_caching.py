"""Prefix caching: found blocks hold what was asked for, and never change a token."""

from __future__ import annotations

import random

import pytest

from backend.core.block_hash import extend_block_hashes, prefix_key
from backend.core.block_pool import BlockPool
from backend.core.kv_cache_manager import KVCacheManager, KVGroupSpec
from backend.request import Request
from backend.sampling_params import SamplingParams
from tests.core.paged_machine import VOCAB, Lab, generate


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCAB), k=length)


def run_one(lab: Lab, key: str, prompt: list[int], max_tokens: int = 4) -> Request:
    request = lab.add(key, prompt, max_tokens=max_tokens)
    assert lab.run()[key] == generate(prompt, max_tokens)
    return request


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 64, 65])
def test_a_prompt_asked_again_runs_its_last_tokens_only(length: int, block_size: int, ahead: int) -> None:
    """All full blocks are found, but never the last token, which has to run for the next one to be sampled.

    With a prompt that is all cached nothing would be left to run (GeeeekExplorer/nano-vllm#144, vllm-project/vllm#17999).
    """
    lab = Lab(block_size=block_size, num_blocks=400 // block_size, prefix_caching=True, ahead=ahead)
    prompt = prompt_of(length)
    assert run_one(lab, "first", prompt).num_cached_tokens == 0
    first_steps = len(lab.steps)
    again = run_one(lab, "again", prompt)
    assert again.num_cached_tokens == (length - 1) // block_size * block_size
    ran = sum(step.num_scheduled_tokens.get("again", 0) for step in lab.steps[first_steps:])
    assert ran == length - again.num_cached_tokens + 3


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_second_turn_finds_the_first_and_its_answer(ahead: int) -> None:
    lab = Lab(block_size=4, num_blocks=100, prefix_caching=True, ahead=ahead)
    prompt = prompt_of(18)
    run_one(lab, "one", prompt, max_tokens=15)
    # Of 33 tokens the last was never run: 32 are there, whichever step computed them.
    second = run_one(lab, "two", prompt + generate(prompt, 15) + prompt_of(5, 1))
    assert second.num_cached_tokens == 32


@pytest.mark.parametrize("differs_at", [0, 3, 4, 11, 12, 19])
def test_what_is_found_ends_before_the_first_token_that_differs(differs_at: int) -> None:
    lab = Lab(block_size=4, prefix_caching=True)
    prompt = prompt_of(20)
    run_one(lab, "a", prompt)
    other = list(prompt)
    other[differs_at] += 1
    assert run_one(lab, "b", other).num_cached_tokens == min(differs_at // 4 * 4, 16)


def test_blocks_are_shared_while_both_run_and_by_later_steps_of_a_prompt_under_way() -> None:
    """The second one comes while the first is in the middle of its prompt, and finds what earlier steps have computed."""
    lab = Lab(block_size=4, num_blocks=64, max_num_batched_tokens=16, prefix_caching=True, ahead=1)
    prompt = prompt_of(40)
    lab.add("a", prompt, max_tokens=4)
    lab.step()
    second = lab.add("b", prompt, max_tokens=4)
    lab.step()
    assert second.num_cached_tokens == 16
    blocks = lab.manager.snapshot().block_ids
    assert blocks["a"][0][:4] == blocks["b"][0][:4]
    assert [lab.manager.pool.ref_cnt(block) for block in blocks["b"][0][:4]] == [2] * 4
    assert lab.run() == {key: generate(prompt, 4) for key in "ab"}


def test_shared_blocks_count_once_when_a_request_is_admitted() -> None:
    """Two of 32 + 8 tokens fit a pool of 13 blocks because 8 blocks are shared."""
    lab = Lab(block_size=4, num_blocks=13, prefix_caching=True, max_num_batched_tokens=64)
    prompt = prompt_of(33)
    lab.add("a", prompt, max_tokens=7)
    lab.step()
    lab.add("b", prompt, max_tokens=7)
    lab.step()
    assert len(lab.scheduler.running) == 2
    assert lab.run() == {key: generate(prompt, 7) for key in "ab"}
    assert not [key for step in lab.steps for key in step.preempted_request_ids]


def test_the_one_used_longest_ago_is_evicted_and_the_end_of_a_prompt_before_its_beginning() -> None:
    lab = Lab(block_size=4, num_blocks=12, prefix_caching=True)
    old, newer = prompt_of(17, 1), prompt_of(17, 2)
    run_one(lab, "old", old, max_tokens=1)
    run_one(lab, "newer", newer, max_tokens=1)
    assert lab.manager.num_cached_tokens == 32
    # Four blocks hold nothing; six more are taken for 39 tokens: two evicted, the last ones of `old`.
    assert run_one(lab, "large", prompt_of(23, 3), max_tokens=1).num_cached_tokens == 0
    assert lab.manager.num_cached_tokens == 24 + 20
    found = lab.manager.get_computed_blocks(Request("x", old, SamplingParams(), frozenset(), 0.0)).block_ids
    assert len(found[0]) == 2
    found = lab.manager.get_computed_blocks(Request("y", newer, SamplingParams(), frozenset(), 0.0)).block_ids
    assert len(found[0]) == 4


def test_a_preempted_request_finds_its_own_blocks_and_counts_no_hit_for_them() -> None:
    lab = Lab(block_size=4, num_blocks=14, prefix_caching=True)
    requests = {key: lab.add(key, prompt_of(9, ord(key)), max_tokens=24) for key in "ab"}
    tokens = lab.run()
    assert tokens == {key: generate(prompt_of(9, ord(key)), 24) for key in "ab"}
    assert requests["b"].num_preemptions > 0
    assert requests["b"].num_cached_tokens == 0
    resumed = [
        new for step in lab.steps for new in step.new_requests if new.request_id == "b" and new.num_computed_tokens
    ]
    assert resumed, "what nobody has taken meanwhile need not run again"


def test_blocks_of_a_request_with_damaged_logits_are_not_found() -> None:
    lab = Lab(block_size=4, prefix_caching=True)
    prompt = prompt_of(20)
    lab.fail_at["a"] = 20
    lab.add("a", prompt)
    while "a" not in lab.finished:
        lab.step()
    assert lab.finished == {"a": "error"}
    assert lab.manager.num_cached_tokens == 0
    assert run_one(lab, "b", prompt).num_cached_tokens == 0


@pytest.mark.parametrize("running", [False, True])
def test_a_reset_forgets_everything(running: bool) -> None:
    lab = Lab(block_size=4, prefix_caching=True)
    prompt = prompt_of(20)
    run_one(lab, "a", prompt, max_tokens=1)
    if running:
        lab.add("under way", prompt_of(30, 9), max_tokens=8)
        lab.step()
    assert lab.manager.reset_prefix_cache() == (48 if running else 20)
    assert lab.manager.num_cached_tokens == 0
    assert run_one(lab, "b", prompt).num_cached_tokens == 0
    lab.manager.check_integrity()


def test_without_a_key_nothing_is_kept() -> None:
    lab = Lab(block_size=4)
    run_one(lab, "a", prompt_of(20))
    assert run_one(lab, "b", prompt_of(20)).num_cached_tokens is None
    assert lab.manager.num_cached_tokens == 0


def test_two_groups_have_chains_of_their_own() -> None:
    """The same tokens have other KV in another group, and a hit needs both."""
    manager = KVCacheManager(20, 4, [KVGroupSpec(1, 1, 1, 1), KVGroupSpec(1, 2, 1, 1, window=8)], prefix_key(model="m"))
    request = Request("a", list(range(9)), SamplingParams(), frozenset(), 0.0)
    manager.take_computed_blocks(request, manager.get_computed_blocks(request))
    assert manager.allocate_slots(request, 9) is not None
    request.num_computed_tokens = 9
    manager.cache_blocks(request)
    held = manager.snapshot().block_ids["a"]
    assert manager.num_cached_tokens == 8
    again = Request("b", list(range(9)), SamplingParams(), frozenset(), 0.0)
    found, num_tokens, _ = manager.get_computed_blocks(again)
    assert (found, num_tokens) == ([held[0][:2], held[1][:2]], 8)
    manager.pool.uncache([held[1][1]])
    found, num_tokens, _ = manager.get_computed_blocks(again)
    assert (found, num_tokens) == ([held[0][:1], held[1][:1]], 4)


def test_a_pool_keeps_one_block_for_each_content() -> None:
    pool = BlockPool(3)
    taken = pool.allocate(2)
    assert taken is not None
    first, second = taken.block_ids
    assert pool.cache(first, b"x")
    assert not pool.cache(second, b"x")
    pool.free([first, second])
    pool.check_integrity()
    assert (pool.num_free_blocks, pool.num_evictable_blocks, pool.lookup(b"x")) == (2, 1, first)
    assert pool.allocate(4) is None
    taken = pool.allocate(3)
    assert taken is not None
    assert (taken.evicted, pool.lookup(b"x")) == ([first], None)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_over_few_prefixes_gives_the_tokens_of_each_prompt_alone(seed: int, ahead: int) -> None:
    """A pool that evicts and preempts, prompts that begin alike and part anywhere, aborts and resets in between.

    A count off by one, or a name that outlives its block, loses blocks or gives them to the wrong prompt
    (Wenyueh/MinivLLM#87, xLLM-AI/xllm#828).

    In the end every block that can be found holds what its name says, and after a reset the pool is free.
    """
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4])
    lab = Lab(
        block_size=block_size,
        num_blocks=80 // block_size,
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice([5, 24, 64]),
        prefix_caching=True,
        ahead=ahead,
    )
    stems = [prompt_of(30, index) for index in range(3)]
    expected, prompts, hits = {}, dict[str, list[int]](), 0
    for index in range(120):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + prompt_of(rng.randint(0, 6), rng.randrange(3))
        prompts[str(index)] = prompt
        count = rng.choice([1, 3, 12])
        request = lab.add(str(index), prompt, max_tokens=count)
        expected[str(index)] = generate(prompt, count)
        for _ in range(rng.choice([0, 1, 3])):
            if lab.scheduler.has_unfinished_requests():
                lab.step()
        if rng.random() < 0.05:
            lab.manager.reset_prefix_cache()
        if rng.random() < 0.1 and (output := lab.scheduler.abort_request(str(index))):
            lab.take(output)
            del expected[str(index)]
        lab.manager.check_integrity()
        hits += request.num_cached_tokens or 0
    tokens = lab.run()
    assert {key: tokens[key] for key in expected} == expected
    assert hits > 0
    contents: dict[bytes, list[int]] = {}
    for key, prompt in prompts.items():
        whole, chain = prompt + tokens[key], list[bytes]()
        extend_block_hashes(chain, whole, len(whole) // block_size, block_size, prefix_key(model="a machine") + b"\0")
        for index, name in enumerate(chain):
            contents[name] = whole[index * block_size :][:block_size]
    assert lab.manager.pool.num_cached_blocks > 0
    for block in lab.manager.pool.cached_blocks():
        assert lab.machine.slots[block * block_size :][:block_size] == contents[lab.manager.pool._hash_of[block]]
    lab.manager.reset_prefix_cache()
    assert lab.manager.pool.num_free_blocks == lab.num_blocks
