"""What a pool's slots are used for at one moment, counted the slow way: the truth that `WasteHistory` has to meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from backend.metrics.kv_use import KVPool


def naive_waste(
    held: Mapping[str, Sequence[Sequence[int]]],
    tokens: Mapping[str, int],
    scheduled: Mapping[str, int],
    num_free: int,
    pool: KVPool,
    block_size: int,
) -> dict[str, int]:
    """Every slot looked at by itself: is there a token in it, and will any query of this step or a later one look at it?

    Args:
        held: request -> its blocks, one list per KV group.
        tokens: request -> tokens in its blocks, those of the step included.
        scheduled: request -> tokens of the step.
        num_free: free blocks.
    """
    references = Counter(block for groups in held.values() for blocks in groups for block in blocks if block)
    written, seen = set(), set()
    for key, groups in held.items():
        for blocks, window in zip(groups, pool.windows, strict=True):
            where = [(block, slot) for block in blocks for slot in range(block_size)][: tokens[key]]
            written |= {(block, slot) for block, slot in where if block}
            for query in range(tokens[key] - scheduled.get(key, 0), tokens[key] + 1):
                seen |= set(where[max(0, query + 1 - window) if window else 0 : query + 1])
    begun = {block for block, _ in written}
    empty = [(block, slot) for block in references for slot in range(block_size) if (block, slot) not in written]
    return {
        "num_slots": len(references) * block_size,
        "num_unused_slots": sum(block in begun for block, _ in empty),
        "num_reserved_slots": sum(block not in begun for block, _ in empty),
        "num_passed_slots": len(written - seen),
        "num_unusable_slots": num_free % pool.region_size * block_size,
        "num_saved_slots": (references.total() - len(references)) * block_size,
        "num_requests": len(held),
    }
