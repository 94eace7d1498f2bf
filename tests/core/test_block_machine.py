"""Whatever is done to the pool in whatever order, every request reads its own tokens, and nothing is lost or held twice.

The machine does to a memory of tokens what a worker does to KV: it copies, and writes each new token once. The model beside
it is lists and sets of blocks, told by what the manager returns. With a window, what a request does not see any more is given
back, and 0 stands for it.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.core.block_hash import prefix_key
from backend.core.kv_blocks import ComputedBlocks
from backend.core.kv_cache_manager import KVGroupSpec
from backend.core.swapping import SwappingKVCacheManager
from backend.metrics.block_map import BlockMap
from backend.request import Request
from backend.sampling_params import SamplingParams

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # of two ids, so that beginnings are often equal
GARBAGE = -1


class BlockMachine(RuleBasedStateMachine):
    NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS = 10, 3, 8

    @initialize(prefix_caching=st.booleans(), window=st.sampled_from([None, None, 1, 4, 6]))
    def begin(self, prefix_caching: bool, window: int | None) -> None:
        key = prefix_key(model="a machine") if prefix_caching else None
        self.window = window
        groups = [KVGroupSpec(1, 1, 1, 1, window=window)]
        self.manager = SwappingKVCacheManager(self.NUM_BLOCKS, self.BLOCK_SIZE, groups, key, self.NUM_HOST_BLOCKS)
        self.manager.log_events(True)
        self.block_map = BlockMap(self.manager.state())
        self.memory = {block: [GARBAGE] * self.BLOCK_SIZE for block in range(1, self.NUM_BLOCKS + 1)}
        self.running: dict[str, Request] = {}
        self.preempted: list[Request] = []
        self.swapped: list[tuple[Request, int]] = []  # and how many of its tokens are in host memory
        self.host: dict[int, list[int]] = {}
        self.held: dict[str, list[int]] = {}  # the model: request -> its blocks
        self.cached: dict[int, list[int]] = {}  # the model: block that can be found -> what is in it
        self.beginnings: dict[int, tuple[int, ...]] = {}  # likewise -> all tokens up to its end
        self.count = 0

    @rule(tokens=TOKENS, repeated=st.integers(1, 3))
    def allocate(self, tokens: list[int], repeated: int) -> None:
        self.admit(self.new(tokens * repeated))

    @precondition(lambda self: self.preempted)
    @rule()
    def resume(self) -> None:
        self.admit(self.preempted.pop())

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=TOKENS)
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        request = self.draw(data)
        request.token_ids.extend(tokens)
        if not self.run(request):
            del request.token_ids[-len(tokens) :]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=TOKENS)
    def fork(self, data: st.DataObject, tokens: list[int]) -> None:
        """Of any part, so that forks share blocks that are partly filled; they go on differently, now or later."""
        source = self.draw(data)
        num_tokens = data.draw(st.integers(0, source.num_computed_tokens))
        request = self.new(source.token_ids[:num_tokens] + tokens)
        computed = self.manager.blocks_of_sample(source, num_tokens)
        held = self.held[source.request_id][: -(-num_tokens // self.BLOCK_SIZE)]
        behind = self.behind(num_tokens)
        if 0 in held[behind:]:
            assert computed is None
            return
        assert computed is not None
        assert computed.block_ids[0] == [0] * behind + held[behind:]
        self.take(request, computed)
        if data.draw(st.booleans()) and not self.run(request):
            self.abort_one(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=TOKENS)
    def hand_over(self, data: st.DataObject, tokens: list[int]) -> None:
        """A fork that goes on when its source is over, in a block that may be full and cached."""
        source = self.draw(data)
        num_tokens = data.draw(st.integers(1, source.num_computed_tokens)) if source.num_computed_tokens else 0
        request = self.new(source.token_ids[:num_tokens] + tokens)
        computed = self.manager.blocks_of_sample(source, num_tokens)
        if computed is None:
            return
        self.take(request, computed)
        self.abort_one(source)
        if not self.run(request):
            self.abort_one(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.abort_one(self.draw(data))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = self.draw(data)
        self.abort_one(request)
        request.num_computed_tokens = 0
        self.preempted.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        request, before = self.draw(data), self.manager.snapshot()
        reached = self.held[request.request_id][self.behind(request.num_computed_tokens) :]
        num_blocks, space = len(reached), self.manager.swap_space
        num_free = space.num_free_blocks
        copies = self.manager.swap_out(request)
        if copies is None:
            assert num_blocks > num_free
            assert self.manager.snapshot() == before
            return
        assert len(copies) == num_free - space.num_free_blocks <= num_blocks
        assert self.manager.caches_prefixes or len(copies) == num_blocks
        self.host |= {host_block: list(self.memory[block]) for block, host_block in copies}
        self.swapped.append((request, request.num_computed_tokens))
        del self.running[request.request_id]
        del self.held[request.request_id]
        request.num_computed_tokens = 0

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), token=st.integers(0, 1))
    def swap_in(self, data: st.DataObject, token: int) -> None:
        request, num_tokens = entry = data.draw(st.sampled_from(self.swapped))
        request.token_ids.append(token)  # it was sampled before
        computed = self.manager.get_computed_blocks(request)
        found = computed.block_ids[0]
        assert computed.num_tokens == max(num_tokens, self.num_found(request))
        referenced = {block for blocks in self.held.values() for block in blocks} | set(found)
        referenced -= {0}
        missing = -(-computed.num_tokens // self.BLOCK_SIZE) - max(len(found), self.behind(computed.num_tokens))
        if missing > self.NUM_BLOCKS - len(referenced):
            request.token_ids.pop()
            return
        self.swapped.remove(entry)
        self.take(request, computed)
        if not self.run(request):
            self.abort_one(request)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def abort_swapped(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.swapped))
        self.swapped.remove(entry)
        self.manager.free(entry[0])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        request = self.draw(data)
        self.manager.uncache_blocks(request)
        held = self.held[request.request_id]
        for block in held:
            self.cached.pop(block, None)
        # Those that it has given back are known by what is in them, as far as the request has names for that.
        num_known = len(request.block_hashes[0]) if request.block_hashes else 0
        for index in range(min(held.count(0), num_known)):
            beginning = tuple(request.token_ids[: (index + 1) * self.BLOCK_SIZE])
            for block in [block for block in self.cached if self.beginnings[block] == beginning]:
                del self.cached[block]

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() == len(self.cached) * self.BLOCK_SIZE
        self.cached.clear()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert {key: groups[0] for key, groups in self.manager.snapshot().block_ids.items()} == self.held
        self.block_map.apply(self.manager.take_events())
        assert {key: groups[0] for key, groups in self.block_map.held.items()} == {
            key: blocks for key, blocks in self.held.items() if blocks
        }
        assert self.block_map.cached == self.cached.keys()
        referenced = {block for blocks in self.held.values() for block in blocks} - {0}
        pool = self.manager.pool
        assert pool.num_referenced_blocks == len(referenced)
        assert pool.num_evictable_blocks == len(self.cached.keys() - referenced)
        for key, request in self.running.items():
            assert self.sees(self.held[key], request.num_computed_tokens, request)
        for block, tokens in self.cached.items():
            assert self.memory[block] == tokens, "what can be found does not change"

    def new(self, tokens: list[int]) -> Request:
        self.count += 1
        return Request(str(self.count), tokens, SamplingParams(), frozenset(), 0.0)

    def draw(self, data: st.DataObject) -> Request:
        return self.running[data.draw(st.sampled_from(sorted(self.running)))]

    def admit(self, request: Request) -> None:
        computed = self.manager.get_computed_blocks(request)
        assert computed.num_tokens == self.num_found(request)
        self.take(request, computed)
        if not self.run(request):
            self.abort_one(request)

    def num_found(self, request: Request) -> int:
        """The longest beginning of which all is found that the token behind it sees."""
        size, limit = self.BLOCK_SIZE, request.num_tokens if self.manager.caches_prefixes else 1
        return max(
            hit
            for hit in range(0, limit, size)
            if all(self.is_found(request, (index + 1) * size) for index in range(self.behind(hit), hit // size))
        )

    def behind(self, num_tokens: int) -> int:
        """Blocks of which the token behind so many sees nothing, counted one by one."""
        first = max(0, num_tokens + 1 - self.window) if self.window else 0
        return sum((index + 1) * self.BLOCK_SIZE <= first for index in range(num_tokens))

    def sees(self, blocks: list[int], num_tokens: int, request: Request) -> bool:
        """Whether the token behind so many finds all that it sees."""
        first = max(0, num_tokens + 1 - self.window) if self.window else 0
        places = [(blocks[at // self.BLOCK_SIZE], at % self.BLOCK_SIZE) for at in range(first, num_tokens)]
        return [self.memory[block][slot] for block, slot in places] == request.token_ids[first:num_tokens]

    def is_found(self, request: Request, num_tokens: int) -> bool:
        """Whether some request has left the block that ends there: the manager tells by hashes, the model by tokens."""
        wanted = tuple(request.token_ids[:num_tokens])
        return any(self.beginnings.get(block) == wanted for block in self.cached)

    def take(self, request: Request, computed: ComputedBlocks) -> None:
        found = list(computed.block_ids[0])
        if computed.origin != "swap":
            assert self.sees(found, computed.num_tokens, request)
        copies = self.manager.take_computed_blocks(request, computed)
        found += [0] * (self.behind(computed.num_tokens) - len(found))
        for host_block, block in copies:
            self.memory[block] = list(self.host[host_block])
            self.cached.pop(block, None)
            found.append(block)
        self.held[request.request_id] = found
        self.running[request.request_id] = request

    def run(self, request: Request) -> bool:
        """Compute all that is known of a request, as one step; False when there is no room."""
        size, start, end = self.BLOCK_SIZE, request.num_computed_tokens, request.num_tokens
        held = self.held[request.request_id]
        held[: self.behind(start)] = [0] * self.behind(start)
        holders = Counter(block for held in self.held.values() for block in held if block)
        replaced = [block for block in held[start // size :] if holders[block] > 1 or block in self.cached]
        num_taken = max(0, -(-end // size) - len(held)) + len(replaced)
        allocation = self.manager.allocate_slots(request, end - start)
        if num_taken > self.NUM_BLOCKS - len(holders):
            assert allocation is None
            assert self.manager.snapshot().block_ids == {key: [blocks] for key, blocks in self.held.items()}
            return False
        assert allocation is not None
        assert [source for source, _ in allocation.copies] == replaced
        taken = allocation.block_ids[0] + [destination for _, destination in allocation.copies]
        assert len(set(taken)) == num_taken
        assert not set(taken) & holders.keys()
        contents = {destination: list(self.memory[source]) for source, destination in allocation.copies}
        for block in taken:
            self.cached.pop(block, None)
            self.memory[block] = contents.get(block, [GARBAGE] * size)
        held.extend(allocation.block_ids[0])
        for source, destination in allocation.copies:
            held[held.index(source)] = destination
        for position in range(start, end):
            self.memory[held[position // size]][position % size] = request.token_ids[position]
        request.num_computed_tokens = end
        if end >= request.next_cache_at:
            self.cache(request)
        if self.manager.caches_prefixes:
            assert all(self.is_found(request, (index + 1) * size) for index in range(start // size, end // size))
        return True

    def cache(self, request: Request) -> None:
        before = set(self.manager.pool.cached_blocks())
        self.manager.cache_blocks(request)
        for index, block in enumerate(self.held[request.request_id]):
            if block in set(self.manager.pool.cached_blocks()) - before:
                self.cached[block] = list(self.memory[block])
                self.beginnings[block] = tuple(request.token_ids[: (index + 1) * self.BLOCK_SIZE])

    def abort_one(self, request: Request) -> None:
        self.manager.free(request)
        del self.running[request.request_id]
        del self.held[request.request_id]


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
