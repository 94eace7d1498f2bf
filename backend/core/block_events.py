"""What happens to the pool's blocks, as it happens: enough to follow every block without looking at the pool."""

from __future__ import annotations

from typing import Literal, NamedTuple

# allocate: a request takes blocks that hold nothing it knows, behind those it has
# share:    a request begins with blocks that the prefix cache has found
# free:     a request gives up all its blocks; those that nobody else holds become evictable if cached, else free
# preempt:  as free, of a request that has to be computed again
# evict:    blocks without a holder are not found any more, because they are about to be allocated
# cache:    blocks can be found from now on
# uncache:  blocks can be found no more; with no ids: no block can
BlockEventKind = Literal["allocate", "share", "free", "preempt", "evict", "cache", "uncache"]


class BlockEvent(NamedTuple):
    kind: BlockEventKind
    request_id: str | None
    group: int  # of the KV groups; 0 where it means nothing
    block_ids: list[int]


class PoolState(NamedTuple):
    """Every block that is not free."""

    held: dict[str, list[list[int]]]  # request -> its blocks in logical order, one list per KV group
    cached: list[int]  # those that can be found, held or not
