"""`KVSums`: what `kv_use` counts, followed from step to step, so that a step costs what happened in it and not the pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backend.core.block_events import BlockEvent, PoolState
from backend.core.block_pool import NULL_BLOCK
from backend.metrics.block_map import FilledBlockMap
from backend.metrics.kv_use import KVPool
from backend.metrics.ledger_format import LedgerStep
from backend.metrics.pool_history import PoolMoment


class _Part:
    """What one request adds to the sums."""

    __slots__ = ("begins", "num_groups", "num_reserved_slots", "num_unused_slots")

    def __init__(self, num_groups: int) -> None:
        self.begins = [0] * num_groups  # per group, the first position that is seen
        self.num_groups = self.num_unused_slots = self.num_reserved_slots = 0


class KVSums(FilledBlockMap):
    """Begins with the pool at one step of a ledger and goes on by the steps behind it.

    Attributes:
        num_references, num_unused_slots, num_reserved_slots, num_passed_slots: as in `KVUse`.
    """

    def __init__(self, moment: PoolMoment, block_size: int, pool: KVPool) -> None:
        super().__init__(PoolState(moment.blocks.held, list(moment.blocks.cached)), moment.num_tokens, block_size)
        self._pool = pool
        self._parts: dict[str, _Part] = {}
        self._ref_counts: dict[int, int] = {}
        self._num_evictable = len(self.cached)
        # Block -> leading slots behind the window of a holder -> such holders; without those that see all of it.
        self._passed: dict[int, dict[int, int]] = {}
        self.num_references = self.num_unused_slots = self.num_reserved_slots = self.num_passed_slots = 0
        for request_id, groups in self.held.items():
            self._parts[request_id] = _Part(len(pool.windows))
            for blocks in groups:
                for block_id in blocks:
                    self._hold(block_id, 0)
        self._scheduled: Mapping[str, int] = _scheduled(moment.step)
        self._count(self.held)

    @property
    def num_referenced_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_unusable_slots(self) -> int:
        """As in `KVUse`."""
        num_free = self._pool.num_blocks - len(self._ref_counts) - self._num_evictable
        return num_free % self._pool.region_size * self.block_size

    def follow(self, step: LedgerStep) -> None:
        super().follow(step)
        changed = {event.request_id for event in step.events}
        if any(self._pool.windows):
            before, self._scheduled = self._scheduled, _scheduled(step)
            # Of a request that ran in the step before, all tokens count as computed now.
            changed.update(before, self._scheduled)
        else:  # then most of a long run are tokens that go into a block that is there
            for request_id, num_tokens, _ in step.entries:
                part = self._parts.get(request_id)
                if part is None or request_id in changed:
                    continue
                num_slots = num_tokens * part.num_groups
                if num_slots <= part.num_unused_slots:
                    part.num_unused_slots -= num_slots
                    self.num_unused_slots -= num_slots
                else:
                    changed.add(request_id)
        self._count(changed)

    def _give(self, event: BlockEvent) -> None:
        request_id, group = event.request_id, event.group
        assert request_id is not None
        part = self._parts.setdefault(request_id, _Part(len(self._pool.windows)))
        super()._give(event)
        blocks = self.held[request_id][group]
        for index in range(len(blocks) - len(event.block_ids), len(blocks)):
            self._hold(blocks[index], self._slots_passed(part, group, index))

    def _release(self, event: BlockEvent) -> None:
        assert event.request_id is not None
        part = self._parts.pop(event.request_id)
        for group, blocks in enumerate(self.held[event.request_id]):
            for index, block_id in enumerate(blocks):
                self._let_go(block_id, self._slots_passed(part, group, index))
        self.num_unused_slots -= part.num_unused_slots
        self.num_reserved_slots -= part.num_reserved_slots
        super()._release(event)

    def _copy(self, event: BlockEvent) -> None:
        assert event.request_id is not None
        source, destination = event.block_ids
        index = self.held[event.request_id][event.group].index(source)
        passed = self._slots_passed(self._parts[event.request_id], event.group, index)
        self._let_go(source, passed)
        self._hold(destination, passed)
        super()._copy(event)

    def _slide(self, event: BlockEvent) -> None:
        assert event.request_id is not None
        part = self._parts[event.request_id]
        begin = self.held[event.request_id][event.group].index(event.block_ids[0])
        for index, block_id in enumerate(event.block_ids, begin):
            self._let_go(block_id, self._slots_passed(part, event.group, index))
        super()._slide(event)

    def _give_back(self, event: BlockEvent) -> None:
        assert event.request_id is not None
        part = self._parts[event.request_id]
        begin = self.held[event.request_id][event.group].index(event.block_ids[0])
        for index, block_id in enumerate(event.block_ids, begin):
            self._let_go(block_id, self._slots_passed(part, event.group, index))
        super()._give_back(event)

    def _find(self, event: BlockEvent) -> None:
        self._num_evictable += self._num_idle(set(event.block_ids) - self.cached)
        super()._find(event)

    def _lose(self, event: BlockEvent) -> None:
        self._num_evictable -= self._num_idle(self.cached.intersection(event.block_ids or self.cached))
        super()._lose(event)

    def _num_idle(self, block_ids: Iterable[int]) -> int:
        """Those that nobody holds."""
        return sum(block_id not in self._ref_counts for block_id in block_ids)

    def _count(self, request_ids: Iterable[str | None]) -> None:
        """Take in what has become of the tokens and blocks of these requests, as far as they hold any."""
        block_size, windows = self.block_size, self._pool.windows
        for request_id in request_ids:
            if request_id is None or request_id not in self.held or request_id not in self.num_tokens:
                continue
            part, groups, tokens = self._parts[request_id], self.held[request_id], self.num_tokens[request_id]
            with_tokens = -(-tokens // block_size)  # blocks of each group
            unused = len(groups) * (with_tokens * block_size - tokens)
            reserved = (sum(map(len, groups)) - len(groups) * with_tokens) * block_size
            self.num_unused_slots += unused - part.num_unused_slots
            self.num_reserved_slots += reserved - part.num_reserved_slots
            part.num_groups, part.num_unused_slots, part.num_reserved_slots = len(groups), unused, reserved
            computed = tokens - self._scheduled.get(request_id, 0)
            for group, (blocks, window) in enumerate(zip(groups, windows, strict=False)):
                if window is not None:
                    self._see_from(part, group, blocks, max(0, computed - window + 1))

    def _see_from(self, part: _Part, group: int, blocks: list[int], begin: int) -> None:
        """The first position that a group sees has moved on; only blocks between it and the last one change."""
        before, part.begins[group] = part.begins[group], begin
        block_size = self.block_size
        for index in range(before // block_size, min(-(-begin // block_size), len(blocks))):
            start = index * block_size
            self._pass(blocks[index], max(0, before - start), min(begin - start, block_size))

    def _slots_passed(self, part: _Part, group: int, index: int) -> int:
        """Leading ones of a request's block that it does not look at any more."""
        begin = part.begins[group] if group < len(part.begins) else 0
        return min(max(0, begin - index * self.block_size), self.block_size)

    def _hold(self, block_id: int, passed: int) -> None:
        """One more holder, who does not look at `passed` leading slots."""
        if block_id == NULL_BLOCK:
            return
        count = self._ref_counts.get(block_id, 0)
        if not count and block_id in self.cached:
            self._num_evictable -= 1
        self.num_passed_slots -= self._lost(block_id)
        self._ref_counts[block_id] = count + 1
        self.num_passed_slots += self._lost(block_id)
        self.num_references += 1
        self._pass(block_id, 0, passed)

    def _let_go(self, block_id: int, passed: int) -> None:
        """One holder less, who did not look at `passed` leading slots."""
        if block_id == NULL_BLOCK:
            return
        self._pass(block_id, passed, 0)
        self.num_passed_slots -= self._lost(block_id)
        self._ref_counts[block_id] -= 1
        self.num_references -= 1
        if not self._ref_counts[block_id]:
            del self._ref_counts[block_id]
            self._num_evictable += block_id in self.cached
        self.num_passed_slots += self._lost(block_id)

    def _pass(self, block_id: int, before: int, now: int) -> None:
        """One holder does not look at `now` leading slots of a block instead of `before`."""
        if before == now or block_id == NULL_BLOCK:
            return
        if self._ref_counts[block_id] == 1:
            self.num_passed_slots += now - before
            if now:
                self._passed[block_id] = {now: 1}
            else:
                del self._passed[block_id]
            return
        self.num_passed_slots -= self._lost(block_id)
        holders = self._passed.setdefault(block_id, {})
        if before:
            holders[before] -= 1
            if not holders[before]:
                del holders[before]
        if now:
            holders[now] = holders.get(now, 0) + 1
        if not holders:
            del self._passed[block_id]
        self.num_passed_slots += self._lost(block_id)

    def _lost(self, block_id: int) -> int:
        """Slots of a block that no holder looks at: the one that sees most of it decides."""
        holders = self._passed.get(block_id)
        if holders is None or sum(holders.values()) < self._ref_counts[block_id]:
            return 0
        return min(holders)


def _scheduled(step: LedgerStep) -> dict[str, int]:
    return {entry.request_id: entry.num_scheduled_tokens for entry in step.entries}
