"""The name of a block's content: a digest chained over all tokens up to its end.

Equal digests mean equal tokens at equal positions under the same key, for all practical purposes: blake2b with 128 bits
has no known collision. The idea of chained block hashes is vLLM's ("Automatic Prefix Caching", 2024).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

BlockHash = bytes
DIGEST_BYTES = 16


def prefix_key(**what: Any) -> BlockHash:
    """The root of every chain: a digest of all that decides what the KV of a token is, besides the tokens before it."""
    return blake2b(repr(_sorted(what)).encode(), digest_size=DIGEST_BYTES).digest()


def extend_block_hashes(
    hashes: list[BlockHash], token_ids: list[int], num_blocks: int, block_size: int, key: BlockHash
) -> None:
    """Append to `hashes` what is missing to `num_blocks` full blocks of `token_ids`, ids below 2^32."""
    parent = hashes[-1] if hashes else key
    for begin in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        tokens = array("I", token_ids[begin : begin + block_size]).tobytes()
        parent = blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)


def _sorted(value: Any) -> Any:
    """Mappings as lists of pairs in order of their keys."""
    if isinstance(value, Mapping):
        return [(key, _sorted(value[key])) for key in sorted(value)]
    return value
