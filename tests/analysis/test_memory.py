from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.analysis.kv_size import kv_size
from backend.analysis.memory import CardMemory, card_memory
from backend.analysis.parameters import read_weights
from tests.analysis import published
from tests.analysis.arithmetic import evaluate

GIB = 2**30

TINY: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 200,
    "sliding_window": 10,
}


def llama_on_80_gib(**changes: Any) -> CardMemory:
    settings = {
        "card_bytes": 80 * GIB,
        "weight_bytes": read_weights(published.LLAMA_3_1_8B).num_bytes().total,
        "activation_bytes": 2 * GIB,
    }
    return card_memory(kv_size(published.LLAMA_3_1_8B), **(settings | changes))


def test_llama_3_1_8b_on_80_gib() -> None:
    """72 GiB − 16,060,522,496 − 2 GiB − one block of 2 MiB = 59,099,308,032 bytes; a request of 1,200 takes 75 blocks."""
    card = llama_on_80_gib()
    assert card.kv_bytes == 72 * GIB - 16_060_522_496 - 2 * GIB - 2 * 2**20 == 59_099_308_032
    assert card.num_blocks == 59_099_308_032 // (2 * 2**20) == 28_180
    fit = card.requests_of(1000, 200)
    assert (fit.num_tokens, fit.bytes_per_request, fit.num_requests) == (1200, 75 * 2 * 2**20, 28_180 // 75)
    request, requests = fit.arithmetic.removesuffix(" requests").split("; ")
    assert evaluate(request.removesuffix(" a request")) == [fit.bytes_per_request] * 2
    exact, rounded = evaluate(requests)
    assert exact // 1 == rounded == 375
    assert evaluate(card.arithmetic.replace(" bytes (55.04 GiB)", "")) == [card.kv_bytes] * 2


def test_the_longest_context_is_the_models_or_the_memorys() -> None:
    card = llama_on_80_gib()
    longest = card.longest_context()
    assert (longest.num_tokens, longest.limited_by) == (131_072, "max_position_embeddings")
    assert f"{28_180 * 16:,} tokens" in longest.arithmetic
    longest = llama_on_80_gib(card_bytes=24 * GIB).longest_context()
    blocks = (int(24 * GIB * 0.9) - 16_060_522_496 - 2 * GIB) // (2 * 2**20) - 1
    assert (longest.num_tokens, longest.limited_by) == (blocks * 16, "memory")


def test_weights_that_do_not_fit_leave_nothing() -> None:
    card = llama_on_80_gib(card_bytes=16 * GIB)
    assert card.kv_bytes < 0
    assert (card.num_blocks, card.requests_of(1, 1).num_requests, card.longest_context().num_tokens) == (0, 0, 0)


def test_fewer_bits_hold_more_requests() -> None:
    kv = kv_size(published.LLAMA_3_1_8B, "int8")
    card = card_memory(kv, card_bytes=80 * GIB, weight_bytes=16_060_522_496, activation_bytes=2 * GIB)
    block = 2 * 32 * 8 * 130 * 16
    assert card.requests_of(1000, 200).num_requests == (72 * GIB - 16_060_522_496 - 2 * GIB - block) // (75 * block)


def naive_longest(card: CardMemory, limit: int) -> int:
    """Add blocks as a request grows token by token; those behind a window are given back."""
    sizes, block_size = card.blocks.group_block_bytes, card.blocks.block_size
    fits = 0
    for length in range(1, limit + 1):
        held = 0
        for group, size in zip(card.blocks.kv.groups, sizes, strict=True):
            first = 0 if group.window is None else max(0, length - group.window)
            held += size * len({position // block_size for position in range(first, length)})
        if held > card.kv_bytes:
            return fits
        fits = length
    return fits


@given(
    layer_types=st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=3, max_size=3),
    window=st.integers(1, 30),
    block_size=st.integers(1, 9),
    card_bytes=st.integers(1, 8000),
    positions=st.none() | st.integers(1, 300),
)
def test_the_longest_context_against_growing_a_request(
    layer_types: list[str], window: int, block_size: int, card_bytes: int, positions: int | None
) -> None:
    kv = kv_size(
        TINY
        | {"model_type": "other", "layer_types": layer_types, "sliding_window": window}
        | {"max_position_embeddings": positions}
    )
    card = card_memory(
        kv, card_bytes=card_bytes, weight_bytes=0, activation_bytes=0, gpu_memory_utilization=1.0, block_size=block_size
    )
    far = 400  # beyond what 8,000 bytes hold of one full layer, and where windows have long stopped growing
    by_memory = naive_longest(card, far)
    longest = card.longest_context()
    if positions is not None and positions <= by_memory:
        assert (longest.num_tokens, longest.limited_by) == (positions, "max_position_embeddings")
    elif by_memory == far:
        assert "full_attention" not in layer_types
        assert (longest.num_tokens, longest.limited_by) == (None, None)
    else:
        assert (longest.num_tokens, longest.limited_by) == (by_memory, "memory")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization 0 is not above 0 and at most 1"),
        ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization 1.01"),
        ({"card_bytes": 0}, "card_bytes 0 is below 1"),
        ({"weight_bytes": -1}, "weight_bytes -1 is below 0"),
        ({"activation_bytes": -1}, "activation_bytes -1 is below 0"),
        ({"block_size": 0}, "block_size 0"),
    ],
)
def test_values_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llama_on_80_gib(**changes)


def test_lengths_out_of_range() -> None:
    with pytest.raises(ValueError, match="prompt_tokens 0"):
        llama_on_80_gib().requests_of(0, 1)
    with pytest.raises(ValueError, match="output_tokens 0"):
        llama_on_80_gib().requests_of(1, 0)
