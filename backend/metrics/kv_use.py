"""What a pool's blocks are used for at one step: tokens, nothing yet, several requests at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backend.core.block_pool import NULL_BLOCK
from backend.metrics.block_map import BlockMap


@dataclass(frozen=True, slots=True)
class RequestUse:
    """One request's part. A block of a model with several KV groups is one of a group's layers."""

    num_blocks: int
    num_shared: int  # of them held by another request as well
    # None where the ledger does not hold the request's beginning. Those behind a window are in blocks no more.
    num_tokens: int | None
    num_unused_slots: int | None  # in the last block that holds a token
    num_reserved_slots: int | None  # in whole blocks without a token


@dataclass(frozen=True, slots=True)
class KVUse:
    """Slots (of one token in the layers of a block) and blocks. Only full blocks are shared: no empty slot counts twice."""

    block_size: int
    requests: dict[str, RequestUse]  # in the order in which they began
    num_references: int  # of all requests to their blocks
    num_referenced_blocks: int
    num_shared_blocks: int  # with more than one holder

    @property
    def num_slots(self) -> int:
        """In blocks that somebody holds."""
        return self.num_referenced_blocks * self.block_size

    @property
    def num_unused_slots(self) -> int:
        """Behind the last token of a block: internal fragmentation, below one block per request and KV group."""
        return sum(use.num_unused_slots or 0 for use in self.requests.values())

    @property
    def num_reserved_slots(self) -> int:
        """In whole blocks kept for tokens that may never come."""
        return sum(use.num_reserved_slots or 0 for use in self.requests.values())

    @property
    def wasted_share(self) -> float | None:
        """Slots that are held and hold no token, of all that are held, 0…1; None when nothing is held."""
        return (self.num_unused_slots + self.num_reserved_slots) / self.num_slots if self.num_slots else None

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that it would take more if every request had its own."""
        return self.num_references - self.num_referenced_blocks

    @property
    def saved_share(self) -> float | None:
        """`num_saved_blocks` of what it would take, 0…1; None when nothing is held."""
        return self.num_saved_blocks / self.num_references if self.num_references else None

    @property
    def num_unknown(self) -> int:
        """Requests whose tokens the ledger does not tell; their slots count as used."""
        return sum(use.num_tokens is None for use in self.requests.values())


def kv_use(blocks: BlockMap, num_tokens: Mapping[str, int], block_size: int) -> KVUse:
    """Args:
    num_tokens: request -> tokens in its blocks, as `PoolMoment.num_tokens`.
    """
    ref_counts = blocks.ref_counts()
    requests = {}
    for request_id, groups in blocks.held.items():
        held = [block_id for group in groups for block_id in group if block_id != NULL_BLOCK]
        shared = sum(ref_counts[block_id] > 1 for block_id in held)
        tokens = num_tokens.get(request_id)
        if tokens is None:
            requests[request_id] = RequestUse(len(held), shared, None, None, None)
            continue
        with_tokens = -(-tokens // block_size)  # blocks of each group
        unused = len(groups) * (with_tokens * block_size - tokens)
        reserved = sum(len(group) - with_tokens for group in groups) * block_size
        requests[request_id] = RequestUse(len(held), shared, tokens, unused, reserved)
    return KVUse(
        block_size=block_size,
        requests=requests,
        num_references=ref_counts.total(),
        num_referenced_blocks=len(ref_counts),
        num_shared_blocks=sum(count > 1 for count in ref_counts.values()),
    )
