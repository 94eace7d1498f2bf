from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.analysis.memory_waste import memory_waste
from backend.core.kv_cache_manager import KVCacheManager, KVGroupSpec
from backend.request import Request
from backend.sampling_params import SamplingParams
from tests.analysis.arithmetic import evaluate


def test_three_requests_by_hand() -> None:
    """1, 16 and 17 tokens: 1 + 1 + 2 blocks of 16 = 64 slots for 34 tokens, against 3 × 100."""
    waste = memory_waste([1, 16, 17], max_model_len=100, block_size=16)
    contiguous, paged = waste.contiguous, waste.paged
    assert (contiguous.used, contiguous.reserved_unused, contiguous.internal, contiguous.reserved) == (34, 266, 0, 300)
    assert (paged.used, paged.reserved_unused, paged.internal, paged.reserved) == (34, 0, 30, 64)
    assert (contiguous.wasted_share, paged.wasted_share) == (266 / 300, 30 / 64)
    assert waste.saved_share == pytest.approx(1 - 64 / 300)
    assert contiguous.arithmetic == "3 requests × 100 slots − 34 tokens = 266 (88.7% of 300)"
    assert paged.arithmetic == "4 blocks × 16 slots − 34 tokens = 30 (46.9% of 64)"
    assert evaluate(contiguous.arithmetic) == [266, 266]
    assert evaluate(paged.arithmetic) == [30, 30]


def test_nothing_reserved_has_no_share() -> None:
    empty = memory_waste([], 100, 16)
    assert (empty.contiguous.wasted_share, empty.paged.wasted_share, empty.saved_share) == (None, None, None)
    admitted = memory_waste([0], 100, 16)
    assert (admitted.contiguous.wasted_share, admitted.paged.wasted_share, admitted.saved_share) == (1.0, None, 1.0)


@given(seq_lens=st.lists(st.integers(1, 60), max_size=8), block_size=st.integers(1, 20))
def test_against_the_engines_allocator(seq_lens: list[int], block_size: int) -> None:
    manager = KVCacheManager(1000, block_size, [KVGroupSpec(1, 1, 1, 2)])
    for index, length in enumerate(seq_lens):
        request = Request(str(index), [1] * length, SamplingParams(), frozenset(), 0.0)
        assert manager.allocate_slots(request, length) is not None
    waste = memory_waste(seq_lens, max_model_len=60, block_size=block_size)
    assert waste.paged.reserved == manager.snapshot().num_referenced_blocks * block_size
    assert waste.paged.internal <= len(seq_lens) * (block_size - 1)
    # Slot by slot: what a contiguous reservation holds beyond each request's end.
    assert waste.contiguous.reserved_unused == sum(1 for n in seq_lens for slot in range(60) if slot >= n)


def test_values_out_of_range() -> None:
    with pytest.raises(ValueError, match="a request of 101 tokens is not within 0 and max_model_len 100"):
        memory_waste([101], 100, 16)
    with pytest.raises(ValueError, match="a request of -1 tokens"):
        memory_waste([-1], 100, 16)
    with pytest.raises(ValueError, match="max_model_len 0 is below 1"):
        memory_waste([], 0, 16)
    with pytest.raises(ValueError, match="block_size 0 is below 1"):
        memory_waste([], 1, 0)
