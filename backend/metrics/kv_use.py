"""What a pool's blocks are used for at one step: tokens, nothing yet, nothing any more, several requests at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from backend.core.block_pool import NULL_BLOCK
from backend.core.kv_groups import group_layers
from backend.metrics.block_map import BlockMap


@dataclass(frozen=True, slots=True)
class KVPool:
    """What of a run, beside its steps, decides which slots are lost."""

    num_blocks: int  # usable ones
    windows: tuple[int | None, ...] = (None,)  # of the KV groups, in tokens; None: the group sees everything
    region_size: int = 1  # blocks that a request takes in one piece; 1: any free block suits any request

    @classmethod
    def of_run(cls, resolved_config: Mapping[str, Any], model: Mapping[str, Any], num_blocks: int) -> Self:
        """Args:
        resolved_config: `EngineConfig.to_dict` of what was run.
        model: as the run's record of its load describes it; older records say nothing of windows.
        """
        sliding = frozenset(model.get("sliding_layers", ()))
        layers = range(model.get("num_layers", 1))
        groups = group_layers([model["sliding_window"] if layer in sliding else None for layer in layers])
        region_size = 1
        if resolved_config["cache"]["layout"] == "contiguous":
            length, block_size = resolved_config["model"]["max_model_len"], resolved_config["cache"]["block_size"]
            region_size = -(-length // block_size) * len(groups)
        return cls(num_blocks, tuple(group.window for group in groups), region_size)


@dataclass(frozen=True, slots=True)
class RequestUse:
    """One request's part. A block of a model with several KV groups is one of a group's layers."""

    num_blocks: int
    num_shared: int  # of them held by another request as well
    # None where the ledger does not hold the request's beginning. Those behind a window are in blocks no more.
    num_tokens: int | None
    num_unused_slots: int | None  # in the last block that holds a token
    num_reserved_slots: int | None  # in whole blocks without a token


class HeldSlots:
    """What follows from how many slots (of one token in the layers of a block) are held, and what for."""

    __slots__ = ()

    num_slots: int  # in blocks that somebody holds
    num_unused_slots: int  # behind the last token of a block: internal fragmentation
    num_reserved_slots: int  # in whole blocks kept for tokens that may never come
    num_passed_slots: int  # hold a token that has fallen behind the window of every holder
    num_saved_slots: int  # that requests would hold beside if nothing were shared

    @property
    def num_wasted_slots(self) -> int:
        """Held, but without a token that anybody will look at."""
        return self.num_unused_slots + self.num_reserved_slots + self.num_passed_slots

    @property
    def num_used_slots(self) -> int:
        """With a token that somebody will look at, or may: see `KVUse.num_unknown`."""
        return self.num_slots - self.num_wasted_slots

    @property
    def wasted_share(self) -> float | None:
        """`num_wasted_slots` of all that are held, 0…1; None when nothing is held."""
        return self.num_wasted_slots / self.num_slots if self.num_slots else None

    @property
    def saved_share(self) -> float | None:
        """`num_saved_slots` of what it would take if nothing were shared, 0…1; None when nothing is held."""
        return self.num_saved_slots / (self.num_slots + self.num_saved_slots) if self.num_slots else None


@dataclass(frozen=True, slots=True)
class KVUse(HeldSlots):
    """Slots and blocks at one step. Only full blocks are shared: no empty slot counts twice."""

    block_size: int
    requests: dict[str, RequestUse]  # in the order in which they began
    num_references: int  # of all requests to their blocks
    num_referenced_blocks: int
    num_shared_blocks: int  # with more than one holder
    num_passed_slots: int
    # External fragmentation: in free blocks that are fewer than any request takes. 0 in a paged layout by construction.
    num_unusable_slots: int

    @property
    def num_slots(self) -> int:
        return self.num_referenced_blocks * self.block_size

    @property
    def num_unused_slots(self) -> int:
        """Below one block per request and KV group."""
        return sum(use.num_unused_slots or 0 for use in self.requests.values())

    @property
    def num_reserved_slots(self) -> int:
        return sum(use.num_reserved_slots or 0 for use in self.requests.values())

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that it would take more if every request had its own."""
        return self.num_references - self.num_referenced_blocks

    @property
    def num_saved_slots(self) -> int:
        return self.num_saved_blocks * self.block_size

    @property
    def num_unknown(self) -> int:
        """Requests whose tokens the ledger does not tell; their slots count as used."""
        return sum(use.num_tokens is None for use in self.requests.values())


def kv_use(
    blocks: BlockMap,
    num_tokens: Mapping[str, int],
    block_size: int,
    pool: KVPool | None = None,
    num_scheduled_tokens: Mapping[str, int] | None = None,
) -> KVUse:
    """Args:
    num_tokens: request -> tokens in its blocks, as `PoolMoment.num_tokens`.
    pool: without it, nothing counts as passed or unusable.
    num_scheduled_tokens: request -> those of `num_tokens` that the step computes; the first of them still looks back.
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
    passed = unusable = 0
    if pool is not None:
        computed = {key: tokens - (num_scheduled_tokens or {}).get(key, 0) for key, tokens in num_tokens.items()}
        passed = _num_passed_slots(blocks, computed, block_size, pool.windows)
        unusable = blocks.counts(pool.num_blocks)[2] % pool.region_size * block_size
    return KVUse(
        block_size=block_size,
        requests=requests,
        num_references=ref_counts.total(),
        num_referenced_blocks=len(ref_counts),
        num_shared_blocks=sum(count > 1 for count in ref_counts.values()),
        num_passed_slots=passed,
        num_unusable_slots=unusable,
    )


def _num_passed_slots(
    blocks: BlockMap, num_computed_tokens: Mapping[str, int], block_size: int, windows: tuple[int | None, ...]
) -> int:
    """Where several requests hold a block, the one that sees most of it decides."""
    if not any(windows):
        return 0
    passed: dict[int, int] = {}  # block -> its leading slots that no holder looks at
    for request_id, groups in blocks.held.items():
        computed = num_computed_tokens.get(request_id, 0)  # of an unknown one, everything counts as used
        for group, window in zip(groups, windows, strict=False):
            begin = 0 if window is None else max(0, computed - window + 1)  # the first position that is seen
            for index, block_id in enumerate(group):
                if block_id != NULL_BLOCK:
                    slots = min(max(0, begin - index * block_size), block_size)
                    passed[block_id] = min(passed.get(block_id, slots), slots)
    return sum(passed.values())
