"""What happens to the pool's blocks, as it happens: enough to follow every block without looking at the pool."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

# allocate: a request takes blocks that hold nothing it knows, behind those it has
# share:    a request begins with blocks that the prefix cache has found, or with those of another sample of its prompt
# copy:     of [source, destination]: a request was about to write into a block that others hold as well, or can find; it
#           has a copy now, in its place
# swap_out: as preempt, but what it has computed is kept in host memory; the blocks that were copied there for it
# swap_in:  as allocate, but with KV that comes out of host memory
# free:     a request gives up all its blocks; those that nobody else holds become evictable if cached, else free
# preempt:  as free, of a request that has to be computed again
# evict:    blocks without a holder are not found any more, because they are about to be allocated
# cache:    blocks can be found from now on
# uncache:  blocks can be found no more; with no ids: no block can
# give_back: a request gives up its last blocks, which drafts that were rejected had been written to
# slide:    a request gives up blocks that have fallen behind the window of their group; the null block is in their places
BlockEventKind = Literal[
    "allocate",
    "share",
    "free",
    "preempt",
    "evict",
    "cache",
    "uncache",
    "copy",
    "swap_out",
    "swap_in",
    "slide",
    "give_back",
]


class BlockEvent(NamedTuple):
    kind: BlockEventKind
    request_id: str | None
    group: int  # of the KV groups; 0 where it means nothing
    block_ids: list[int]  # of a `share` and a `swap_in` maybe the null block first, for what lies behind a window
    # With a `share` from another sample and with `swap_in`, the tokens in those blocks, of which the last may be partly
    # filled; with `swap_out` all that the request has computed. Else 0: blocks of the prefix cache are full, and new ones
    # hold nothing.
    num_tokens: int = 0


class PoolState(NamedTuple):
    """Every block that is not free."""

    held: dict[str, list[list[int]]]  # request -> its blocks in logical order, one list per KV group
    cached: list[int]  # those that can be found, held or not
    # Request -> tokens in its blocks, those of the step for which the blocks were taken included; only where it is known.
    num_tokens: Mapping[str, int] = MappingProxyType({})
