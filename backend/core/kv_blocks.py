"""What the `KVCacheManager` says of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(slots=True)
class KVAllocation:
    """Blocks newly given to a request, one list per KV group, in logical order.

    `copies`, (source, destination), are not among them: each destination takes the place of a block that the request was
    about to write into and that others hold as well, or can find. Whoever writes has to copy first.
    """

    block_ids: list[list[int]]
    copies: list[tuple[int, int]]


class ComputedBlocks(NamedTuple):
    """Blocks that hold a request's first tokens, one list per KV group; the null block where nothing is behind a window.

    `origin`: held by the request already, found in the prefix cache, or those of another sample of its prompt; of the last
    ones, one that is partly filled is shared until somebody writes into it, and then copied. Or in host memory: then only
    the first blocks are here, because the prefix cache has them as well.
    """

    block_ids: list[list[int]]
    num_tokens: int
    origin: Literal["held", "cache", "sample", "swap"]


@dataclass(frozen=True, slots=True)
class KVCacheSnapshot:
    """The pool at one moment. `block_ids` maps each request to its blocks, one list per KV group."""

    num_referenced_blocks: int
    num_evictable_blocks: int
    num_free_blocks: int
    block_ids: dict[str, list[list[int]]]
