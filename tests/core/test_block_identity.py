"""What makes two blocks the same: nearly equal prompts do not get each other's KV.

Elsewhere a block's name kept 8 bits of each token id (waybarrios/vllm-mlx#444), left out the block before, or was a 64-bit
hash with nothing compared behind it. Here the name is a digest of at least 128 bits over the ids as 32-bit integers and the
name of the block before, and nothing else decides.
"""

from __future__ import annotations

import random
import struct
from functools import cache
from hashlib import blake2b

import pytest

from backend.core.block_hash import DIGEST_BYTES, extend_block_hashes, prefix_key
from backend.core.block_pool import BlockPool
from tests.core.paged_machine import VOCAB, Lab, generate

PROMPT = random.Random(32).choices(range(2**16, 2**16 + VOCAB), k=32)


def pairs(block_size: int) -> list[tuple[list[int], list[int]]]:
    """Prompts of 32 tokens and the ones beside them."""
    made = []
    for at in range(32):
        for difference in (256,) if at % 5 else (256, -256, 1, 2**16):
            made.append((PROMPT, [*PROMPT[:at], PROMPT[at] + difference, *PROMPT[at + 1 :]]))
    blocks = [PROMPT[begin : begin + block_size] for begin in range(0, 32, block_size)]
    for first in range(len(blocks)):
        for second in range(first + 1, len(blocks)):
            swapped = list(blocks)
            swapped[first], swapped[second] = blocks[second], blocks[first]
            made.append((PROMPT, [token_id for block in swapped for token_id in block]))
    other = [token_id + 7 for token_id in blocks[0]]
    made.append((PROMPT, other + PROMPT[block_size:]))
    # The same block twice: at another place it is another one.
    made.append((blocks[0] + PROMPT[block_size:], blocks[-1] + PROMPT[block_size:]))
    return made


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_of_prompts_that_are_nearly_equal_only_what_comes_before_the_difference_is_found(block_size: int) -> None:
    for first, second in pairs(block_size):
        assert len(first) == len(second) == 32
        differs_at = next(at for at in range(32) if first[at] != second[at])
        lab = Lab(block_size=block_size, prefix_caching=True)
        lab.add("first", first)
        assert lab.run()["first"] == cold(tuple(first), block_size)
        request = lab.add("second", second)
        assert lab.run()["second"] == cold(tuple(second), block_size)
        assert request.num_cached_tokens == min(differs_at, 31) // block_size * block_size
        # And the other way round, now that both are there; all but the last token, which has to run, is found.
        again = lab.add("again", first)
        assert lab.run()["again"] == cold(tuple(first), block_size)
        assert again.num_cached_tokens == 31 // block_size * block_size


@cache
def cold(prompt: tuple[int, ...], block_size: int) -> list[int]:
    """In an engine that has seen nothing and keeps nothing."""
    lab = Lab(block_size=block_size)
    lab.add("cold", prompt)
    tokens = lab.run()["cold"]
    assert tokens == generate(prompt, 8)
    return tokens


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_name_is_a_digest_of_the_ids_and_of_the_name_before(block_size: int) -> None:
    """In closed form, with ids that need all 32 bits."""
    assert 8 * DIGEST_BYTES >= 128
    parent = key = prefix_key(model="m")
    token_ids = [0, 1, 255, 256, 257, 65_535, 65_536, 2**24, 2**31, 2**32 - 1] * 5
    names: list[bytes] = []
    extend_block_hashes(names, token_ids, len(token_ids) // block_size, block_size, key)
    assert len(names) == len(token_ids) // block_size
    for index, name in enumerate(names):
        block = token_ids[index * block_size : (index + 1) * block_size]
        parent = blake2b(parent + struct.pack(f"={block_size}I", *block), digest_size=DIGEST_BYTES).digest()
        assert name == parent
    assert len(set(names)) == len(names), "the same ids at another place have another name"


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_that_does_not_fit_is_an_error_and_not_cut(token_id: int) -> None:
    with pytest.raises(OverflowError):
        extend_block_hashes([], [token_id], 1, 1, prefix_key(model="m"))


def test_the_pool_compares_every_bit_of_a_name() -> None:
    name = prefix_key(model="m")
    pool = BlockPool(1)
    pool.allocate(1)
    assert pool.cache(1, name)
    assert pool.lookup(name) == 1
    for bit in range(8 * len(name)):
        other = bytearray(name)
        other[bit // 8] ^= 1 << bit % 8
        assert pool.lookup(bytes(other)) is None


def test_hashes_follow_the_key_and_every_token_before() -> None:
    def hashes(token_ids: list[int], **what: object) -> list[bytes]:
        chain: list[bytes] = []
        extend_block_hashes(chain, token_ids, len(token_ids) // 4, 4, prefix_key(**what))
        return chain

    token_ids = list(range(12))
    base = hashes(token_ids, model="m", dtype="bfloat16")
    assert len(set(base)) == 3
    assert hashes(token_ids, dtype="bfloat16", model="m") == base, "the order of the keys means nothing"
    for other in ({"model": "n", "dtype": "bfloat16"}, {"model": "m", "dtype": "float16"}, {"model": "m"}):
        assert not set(hashes(token_ids, **other)) & set(base)
    changed = hashes([*token_ids[:5], 77, *token_ids[6:]], model="m", dtype="bfloat16")
    assert changed[0] == base[0]
    assert not set(changed[1:]) & set(base)
    # In steps, as a request grows.
    chain = base[:1]
    extend_block_hashes(chain, token_ids, 3, 4, prefix_key(model="m", dtype="bfloat16"))
    assert chain == base
