"""A thousand requests through a pool of twenty blocks: no block is lost, and none is handed to the wrong prompt.

A count that begins at 0, a release before the block is named, a name that outlives its block or a last block of size 0 lose
a block per request or give a prompt another one's KV (Wenyueh/MinivLLM#87, xLLM-AI/xllm#828, kekzl/imp#1115). Tokens are
hashes of what is read through the block tables, so that KV of somebody else shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from backend.core.block_hash import extend_block_hashes, prefix_key
from tests.core.paged_machine import Lab, generate

NUM_BLOCKS, BLOCK_SIZE, NUM_REQUESTS = 20, 4, 500
KEY = prefix_key(model="a machine") + b"\0"  # of the first KV group


@dataclass
class Ask:
    prompt: list[int]
    max_tokens: int
    is_aborted: bool
    steps_before: int  # of its life, before it is aborted


def traffic() -> dict[str, Ask]:
    """Prompts of 1 to 24 tokens, of which half begin as others do; every length, and some that end with their first token."""
    rng = random.Random(3)
    stems = [rng.choices(range(1000), k=24) for _ in range(3)]
    asked = {}
    for index in range(NUM_REQUESTS):
        length = 1 + index % 24
        shared = rng.randint(1, length) if rng.random() < 0.5 else 0
        prompt = rng.choice(stems)[:shared] + rng.choices(range(1000), k=length - shared)
        asked[str(index)] = Ask(prompt, rng.choice((1, 1, 3, 9, 24)), rng.random() < 0.1, rng.randint(0, 4))
    return asked


@dataclass
class Watched:
    """A lab after every step of which the pool is looked at."""

    lab: Lab
    asked: dict[str, Ask]
    most_used: float = 0.0
    num_evicted: int = 0
    contents: dict[bytes, list[int]] = field(default_factory=dict)  # by name: all tokens up to a block's end

    def step(self) -> None:
        lab, pool = self.lab, self.lab.manager.pool
        before = set(pool.cached_blocks())
        lab.step()
        self.num_evicted += len(before - set(pool.cached_blocks()))
        self.most_used = max(self.most_used, lab.manager.usage)
        assert pool.num_referenced_blocks + pool.num_evictable_blocks + pool.num_free_blocks == NUM_BLOCKS
        self.check_contents()

    def check_contents(self) -> None:
        """Every name in the cache is that of what its block holds."""
        for key, ask in self.asked.items():
            if key in self.lab.tokens:
                self.name(ask.prompt + self.lab.tokens[key])
        pool = self.lab.manager.pool
        for name, block in pool._block_of.items():
            begin = block * BLOCK_SIZE
            assert self.lab.machine.slots[begin : begin + BLOCK_SIZE] == self.contents[name][-BLOCK_SIZE:]
            assert pool._hash_of[block] == name

    def name(self, token_ids: list[int]) -> None:
        chain: list[bytes] = []
        extend_block_hashes(chain, token_ids, len(token_ids) // BLOCK_SIZE, BLOCK_SIZE, KEY)
        for index, name in enumerate(chain, 1):
            content = token_ids[: index * BLOCK_SIZE]
            assert self.contents.setdefault(name, content) == content


def outputs(prefix_caching: bool, at_once: int, ahead: int) -> tuple[Watched, dict[str, list[int]]]:
    lab = Lab(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        prefix_caching=prefix_caching,
        ahead=ahead,
    )
    watched = Watched(lab, {})
    to_abort: dict[str, int] = {}  # request -> the step before which it is
    for key, ask in traffic().items():
        lab.add(key, ask.prompt, ask.max_tokens)
        watched.asked[key] = ask
        if ask.is_aborted:
            to_abort[key] = len(lab.steps) + ask.steps_before
        while len(lab.scheduler.requests) >= at_once:
            for victim in [key for key, at in to_abort.items() if at <= len(lab.steps)]:
                del to_abort[victim]
                if victim in lab.scheduler.requests:
                    lab.abort(victim)
            if lab.scheduler.requests:
                watched.step()
        watched.asked = {key: ask for key, ask in watched.asked.items() if key in lab.scheduler.requests}
    while lab.scheduler.has_unfinished_requests():
        watched.step()
    return watched, lab.run()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("at_once", [1, 8])
def test_five_hundred_requests(at_once: int, ahead: int) -> None:
    asked = traffic()
    assert {len(ask.prompt) for ask in asked.values()} == set(range(1, 25))
    watched, tokens = outputs(True, at_once, ahead)
    lab, pool = watched.lab, watched.lab.manager.pool
    _, uncached = outputs(False, at_once, ahead)
    for key, ask in asked.items():
        whole = generate(ask.prompt, ask.max_tokens)
        if lab.finished[key] == "abort":
            assert ask.is_aborted
            assert tokens[key] == whole[: len(tokens[key])]
        else:
            assert tokens[key] == whole
        shared = min(len(tokens[key]), len(uncached[key]))  # an aborted one may be further in one of them
        assert tokens[key][:shared] == uncached[key][:shared]
        assert ask.is_aborted or shared == len(whole)

    # What was meant to happen has happened.
    assert watched.num_evicted > 100
    assert sum(reason == "abort" for reason in lab.finished.values()) > 10
    assert any(new.num_computed_tokens for step in lab.steps for new in step.new_requests), "prompts were found"
    assert any(step.preempted_request_ids for step in lab.steps) == (at_once == 8)

    assert watched.most_used <= 1.0
    assert (watched.most_used > 0.9) == (at_once == 8)
    assert pool.num_referenced_blocks == 0
    assert pool.num_free_blocks + pool.num_evictable_blocks == NUM_BLOCKS
    assert pool.num_evictable_blocks > 0
    assert lab.manager.reset_prefix_cache() > 0
    assert pool.num_free_blocks == NUM_BLOCKS
    lab.manager.check_integrity()
