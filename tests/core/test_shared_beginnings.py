"""Prompts that are all in the prefix cache, and block names that may not be mistaken for one another."""

from __future__ import annotations

import random

import pytest

from backend.core.block_hash import extend_block_hashes, prefix_key
from tests.core.paged_machine import VOCAB, Lab, generate


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 20])
@pytest.mark.parametrize("budget", [7, 64])
def test_a_prompt_that_is_all_cached_still_runs_its_last_token(max_tokens: int, budget: int, ahead: int) -> None:
    """Of a prompt that is wholly cached nothing would be left to run, and nothing to sample from (nano-vllm#144).

    Lengths around blocks of 16, each three times, and each a beginning of the one prompt that was there before.
    """
    lab = Lab(block_size=16, num_blocks=40, max_num_batched_tokens=budget, prefix_caching=True, ahead=ahead)
    longest = random.Random(0).choices(range(VOCAB), k=48)
    lab.add("longest", longest, max_tokens=max_tokens)
    lab.run()
    for length in (15, 16, 17, 32, 33, 48):
        prompt = longest[:length]
        for turn in range(3):
            request = lab.add(f"{length}/{turn}", prompt, max_tokens=max_tokens)
            assert lab.run()[f"{length}/{turn}"] == generate(prompt, max_tokens)
            assert request.num_cached_tokens == (length - 1) // 16 * 16 < length
        assert lab.manager.pool.num_referenced_blocks == 0


def test_a_change_of_any_bit_of_any_id_changes_every_name_from_there_on() -> None:
    """A name that kept some bits of an id would give two prompts each other's blocks (waybarrios/vllm-mlx#444)."""

    def names(token_ids: list[int]) -> list[bytes]:
        chain: list[bytes] = []
        extend_block_hashes(chain, token_ids, 4, 4, prefix_key(model="m"))
        return chain

    token_ids = random.Random(1).choices(range(2**31), k=16)
    base = names(token_ids)
    seen = set(base)
    for place in range(16):
        for bit in range(31):
            changed = names([*token_ids[:place], token_ids[place] ^ 1 << bit, *token_ids[place + 1 :]])
            same = place // 4
            assert changed[:same] == base[:same]
            assert not seen & set(changed[same:])
            seen |= set(changed[same:])
