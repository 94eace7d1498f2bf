"""Reservations in one piece, in whatever order they are made and given back: nobody writes where another one does.

The model is the pool as a row of blocks with the name of who has each, told by what the manager returns. A request fits when
a run of free blocks is as long as a reservation. What is left of shorter runs is external fragmentation: as all reservations
are equal, it is to be no more than the pool has beyond whole ones. Each request's tokens are written into its piece as a
worker would, and read back after every step.
"""

from __future__ import annotations

from itertools import groupby

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.kv_layouts import ContiguousKVCacheManager
from backend.metrics.block_map import BlockMap
from backend.metrics.kv_use import KVPool, kv_use
from backend.request import Request
from backend.sampling_params import SamplingParams


class ContiguousMachine(RuleBasedStateMachine):
    @initialize(
        num_pieces=st.integers(1, 5),
        num_left=st.integers(0, 9),
        block_size=st.sampled_from([1, 3, 4]),
        length=st.integers(1, 17),
        windows=st.sampled_from([(None,), (4,), (None, 2)]),
    )
    def begin(
        self, num_pieces: int, num_left: int, block_size: int, length: int, windows: tuple[int | None, ...]
    ) -> None:
        self.block_size, self.length, self.num_groups = block_size, length, len(windows)
        self.per_group = -(-length // block_size)
        self.piece = self.per_group * self.num_groups
        self.num_blocks = num_pieces * self.piece + num_left % self.piece
        groups = [KVGroupSpec(1, 1, 1, 1, window=window) for window in windows]
        self.manager = ContiguousKVCacheManager(self.num_blocks, block_size, groups, length)
        self.manager.log_events(True)
        self.block_map = BlockMap(self.manager.state())
        self.owners: list[str | None] = [None] * (self.num_blocks + 1)  # of each block; the null block is nobody's
        self.owners[0] = "nobody"
        self.memory: dict[tuple[int, int], int] = {}  # (block, slot) -> token
        self.running: dict[str, Request] = {}
        self.preempted: list[Request] = []
        self.count = 0

    @rule(num_tokens=st.integers(1, 17))
    def allocate(self, num_tokens: int) -> None:
        self.admit(Request(str(self.count), self.new_tokens(num_tokens), SamplingParams(), frozenset(), 0.0))

    @precondition(lambda self: self.preempted)
    @rule()
    def resume(self) -> None:
        self.admit(self.preempted.pop(0))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 6))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        """As far as its length allows; the room is there already."""
        request = self.draw(data)
        request.token_ids.extend(self.new_tokens(num_tokens)[: self.length - request.num_tokens])
        if request.num_computed_tokens < request.num_tokens:
            allocation = self.manager.allocate_slots(request, request.num_tokens - request.num_computed_tokens)
            assert allocation is not None
            assert allocation.block_ids == [[] for _ in range(self.num_groups)]
            assert not allocation.copies
            self.write(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.give_back(self.draw(data))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Again when it is over already, which changes nothing."""
        request = self.draw(data)
        self.give_back(request)
        self.manager.free(request)

    @rule()
    def abort_one_that_waits(self) -> None:
        self.manager.free(self.preempted.pop() if self.preempted else self.stranger())

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """There is no host memory to go to; it begins again with nothing."""
        request = self.draw(data)
        before = self.manager.snapshot()
        assert self.manager.swap_out(request) is None
        assert self.manager.snapshot() == before
        self.give_back(request)
        request.num_computed_tokens = 0
        self.preempted.append(request)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, pool = self.manager, self.manager.pool
        manager.check_integrity()
        num_free = self.owners.count(None)
        assert (pool.num_free_blocks, pool.num_evictable_blocks) == (num_free, 0)
        assert pool.num_referenced_blocks == len(self.running) * self.piece
        assert {
            key: {block for group in held for block in group} for key, held in manager.snapshot().block_ids.items()
        } == {key: {block for block, owner in enumerate(self.owners) if owner == key} for key in self.running}
        assert all(pool.ref_cnt(block) == 1 for block, owner in enumerate(self.owners) if owner and block)
        # Nobody is refused for want of one piece where enough blocks are free.
        assert self.num_that_fit() == num_free // self.piece
        self.block_map.apply(manager.take_events())
        assert self.block_map.held == manager.snapshot().block_ids
        tokens = {key: request.num_computed_tokens for key, request in self.running.items()}
        kv_pool = KVPool(self.num_blocks, (None,) * self.num_groups, self.piece)
        use = kv_use(self.block_map, tokens, self.block_size, kv_pool)
        assert use.num_unusable_slots == (num_free - self.num_that_fit() * self.piece) * self.block_size
        assert use.num_shared_blocks == 0
        for key, request in self.running.items():
            for blocks in manager.block_ids_of(request):
                read = [self.memory[self.slot(blocks, position)] for position in range(request.num_computed_tokens)]
                assert read == request.token_ids[: request.num_computed_tokens], f"request {key} was written over"

    def num_that_fit(self) -> int:
        """Reservations for which there are runs of free blocks."""
        runs = [len(list(run)) for owner, run in groupby(self.owners) if owner is None]
        return sum(run // self.piece for run in runs)

    def admit(self, request: Request) -> None:
        computed = self.manager.get_computed_blocks(request)
        assert (computed.num_tokens, computed.block_ids) == (0, [[] for _ in range(self.num_groups)])
        self.manager.take_computed_blocks(request, computed)
        before, fits = self.manager.snapshot(), self.num_that_fit() > 0
        assert self.manager.blocks_needed(request.num_tokens) == self.piece
        allocation = self.manager.allocate_slots(request, request.num_tokens)
        if not fits:
            assert allocation is None
            assert self.manager.snapshot() == before
            self.manager.free(request)
            return
        assert allocation is not None
        assert not allocation.copies
        blocks = [block for group in allocation.block_ids for block in group]
        assert [len(group) for group in allocation.block_ids] == [self.per_group] * self.num_groups
        assert blocks == list(range(blocks[0], blocks[0] + self.piece)), "one piece, group behind group"
        for block in blocks:
            assert self.owners[block] is None
            self.owners[block] = request.request_id
        self.running[request.request_id] = request
        assert request.num_slots >= self.length
        self.write(request)

    def write(self, request: Request) -> None:
        for blocks in self.manager.block_ids_of(request):
            for position in range(request.num_computed_tokens, request.num_tokens):
                self.memory[self.slot(blocks, position)] = request.token_ids[position]
        request.num_computed_tokens = request.num_tokens

    def slot(self, blocks: list[int], position: int) -> tuple[int, int]:
        return blocks[position // self.block_size], position % self.block_size

    def give_back(self, request: Request) -> None:
        self.manager.free(request)
        del self.running[request.request_id]
        self.owners = [None if owner == request.request_id else owner for owner in self.owners]

    def new_tokens(self, num_tokens: int) -> list[int]:
        """No two alike, so that a token tells whose it is."""
        num_tokens = min(num_tokens, self.length)
        self.count += num_tokens
        return list(range(self.count - num_tokens, self.count))

    def draw(self, data: st.DataObject) -> Request:
        return self.running[data.draw(st.sampled_from(sorted(self.running)))]

    def stranger(self) -> Request:
        return Request("stranger", [1], SamplingParams(), frozenset(), 0.0)


TestContiguousBlocks = ContiguousMachine.TestCase
TestContiguousBlocks.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
