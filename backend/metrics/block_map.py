"""`BlockMap`: the KV pool at one step, followed by its events alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from backend.core.block_events import BlockEvent, PoolState
from backend.core.block_pool import NULL_BLOCK


class BlockMap:
    """Begins with a key frame of the ledger and goes on by the events of the steps behind the one it belongs to.

    Attributes:
        held: request -> its blocks in logical order, one list per KV group; the null block for what is behind a window.
        cached: blocks that can be found by a later request, held or not.
    """

    def __init__(self, state: PoolState) -> None:
        self.held: dict[str, list[list[int]]] = {
            key: [list(blocks) for blocks in groups] for key, groups in state.held.items()
        }
        self.cached: set[int] = set(state.cached)

    def apply(self, events: Iterable[BlockEvent]) -> None:
        """Raises `KeyError` for the end of a request that holds nothing: the events are not those that followed."""
        for event in events:
            if event.kind in ("allocate", "share", "swap_in"):
                assert event.request_id is not None
                groups = self.held.setdefault(event.request_id, [])
                while len(groups) <= event.group:
                    groups.append([])
                groups[event.group].extend(event.block_ids)
            elif event.kind == "copy":
                assert event.request_id is not None
                blocks = self.held[event.request_id][event.group]
                source, destination = event.block_ids
                blocks[blocks.index(source)] = destination
            elif event.kind == "slide":
                assert event.request_id is not None
                blocks = self.held[event.request_id][event.group]
                begin = blocks.index(event.block_ids[0])
                blocks[begin : begin + len(event.block_ids)] = [NULL_BLOCK] * len(event.block_ids)
            elif event.kind in ("free", "preempt", "swap_out"):
                assert event.request_id is not None
                del self.held[event.request_id]
            elif event.kind == "cache":
                self.cached.update(event.block_ids)
            elif event.block_ids:
                self.cached.difference_update(event.block_ids)
            else:
                self.cached.clear()

    def ref_counts(self) -> Counter[int]:
        """Block -> requests that hold it."""
        counts = Counter(block_id for groups in self.held.values() for blocks in groups for block_id in blocks)
        del counts[NULL_BLOCK]
        return counts

    def counts(self, num_blocks: int) -> tuple[int, int, int]:
        """Referenced, evictable and free blocks of a pool of so many."""
        referenced = self.ref_counts()
        evictable = sum(block_id not in referenced for block_id in self.cached)
        return len(referenced), evictable, num_blocks - len(referenced) - evictable
