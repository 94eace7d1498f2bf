from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.core.block_pool import BlockPool
from backend.core.kv_cache_manager import KVCacheManager, KVGroupSpec
from backend.request import Request
from backend.sampling_params import SamplingParams


def request_of(request_id: str, num_tokens: int = 1) -> Request:
    return Request(request_id, [1] * num_tokens, SamplingParams(), frozenset(), 0.0)


def test_a_failed_allocation_changes_nothing() -> None:
    """Else it keeps the first blocks of several (inference-sim/inference-sim#200)."""
    manager = KVCacheManager(3, 4, [KVGroupSpec(1, 1, 1, 1)])
    request = request_of("a")
    assert manager.allocate_slots(request, 4) is not None
    before = manager.snapshot()
    assert manager.allocate_slots(request, 20) is None
    assert manager.snapshot() == before
    assert manager.allocate_slots(request_of("b"), 9) is None
    assert manager.snapshot() == before


def test_a_block_freed_twice_is_an_error_and_not_a_second_owner() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1).block_ids  # type: ignore[union-attr]
    pool.free([block])
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free([block])


def test_integrity_notices_a_lost_block() -> None:
    manager = KVCacheManager(4, 4, [KVGroupSpec(1, 1, 1, 1)])
    manager.pool.allocate(1)
    with pytest.raises(RuntimeError, match="1 references but 0 holders"):
        manager.check_integrity()


def test_bytes_per_token_of_llama_3_8b_in_bf16() -> None:
    assert KVGroupSpec(num_layers=32, num_kv_heads=8, head_dim=128, dtype_bytes=2).bytes_per_token == 131_072


class PoolMachine(RuleBasedStateMachine):
    """allocate / append / free against a model that is a dict of token counts."""

    NUM_BLOCKS, BLOCK_SIZE = 12, 4

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(self.NUM_BLOCKS, self.BLOCK_SIZE, [KVGroupSpec(1, 1, 1, 1)])
        self.requests: dict[str, Request] = {}
        self.count = 0

    def model_blocks(self) -> int:
        return sum(-(-request.num_computed_tokens // self.BLOCK_SIZE) for request in self.requests.values())

    @rule(num_tokens=st.integers(1, 40))
    def admit(self, num_tokens: int) -> None:
        self.count += 1
        self.grow(request_of(str(self.count)), num_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        self.grow(self.requests[data.draw(st.sampled_from(sorted(self.requests)))], num_tokens)

    def grow(self, request: Request, num_tokens: int) -> None:
        others = self.model_blocks() - -(-request.num_computed_tokens // self.BLOCK_SIZE)
        fits = others + -(-(request.num_computed_tokens + num_tokens) // self.BLOCK_SIZE) <= self.NUM_BLOCKS
        allocation = self.manager.allocate_slots(request, num_tokens)
        assert (allocation is not None) == fits
        if allocation is not None:
            request.num_computed_tokens += num_tokens
            self.requests[request.request_id] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.manager.free(self.requests.pop(data.draw(st.sampled_from(sorted(self.requests)))))

    @rule()
    def free_a_stranger(self) -> None:
        self.manager.free(request_of("stranger"))

    @invariant()
    def conserved(self) -> None:
        self.manager.check_integrity()
        snapshot = self.manager.snapshot()
        assert snapshot.num_referenced_blocks == self.model_blocks()
        assert snapshot.num_referenced_blocks + snapshot.num_free_blocks == self.NUM_BLOCKS
        held = [block for groups in snapshot.block_ids.values() for block in groups[0]]
        assert len(held) == len(set(held))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
