"""A short chunk behind a long context: its keys in shares, and their sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.ops import arrivals
from kernels.ops.attention_tiles import (
    LONG_CONTEXT,
    MAX_SHORT_SPLITS,
    MAX_SPLITS,
    MIN_KEYS,
    SHORT_MIN_KEYS,
    choose_num_splits,
    tile_sizes,
)
from kernels.ops.paged_attention import paged_attention
from kernels.reference.paged_attention import paged_attention as reference
from kernels.registry import REGISTRY
from kernels.specs.paged_attention import make_inputs
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands
from tests.kernels.paged_attention_agreement import short_shares

# One share or many, shares that a tile fills or not, rows that see nothing of the last share, a row alone, no rows.
LENGTHS: dict[str, Any] = {"query_lens": [20, 3, 1, 0, 9], "seq_lens": [201, 3, 90, 0, 64]}
SMALL: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32}


def assert_agrees(inputs: dict[str, Any], num_splits: int) -> None:
    """Counters are found at zero by the next launch, whatever its cut."""
    output = paged_attention(**inputs, tiles=short_shares(inputs), num_splits=num_splits)
    tolerance = REGISTRY["paged_attention"].tolerances[output.dtype]
    torch.testing.assert_close(output, reference(**inputs), atol=tolerance.atol, rtol=tolerance.rtol)
    assert all(not counters.any() for counters in arrivals._COUNTERS[output.device])


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("num_splits", [2, 4, 16])
def test_shares_add_up(num_splits: int, window: int | None, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, window=window, **LENGTHS, **SMALL)
    assert_agrees(inputs, num_splits)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_in_every_dtype_beside_not_a_number(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs, bands = make_inputs(dtype, device, **LENGTHS, **(SMALL | {"head_dim": head_dim})), GuardBands()
    for name in ("query", "key_cache", "value_cache"):
        inputs[name] = bands.wrap(inputs[name])
    assert_agrees(inputs, 8)
    bands.assert_untouched()


def test_one_share_is_what_there_was_without(device: torch.device) -> None:
    """Where contexts are shorter than a share, bit for bit."""
    inputs = make_inputs(torch.float32, device, query_lens=[5, 2], seq_lens=[16, 9], **SMALL)
    tiles = short_shares(inputs)
    whole = paged_attention(**inputs, tiles=tiles, num_splits=1)
    assert torch.equal(paged_attention(**inputs, tiles=tiles, num_splits=8), whole)


def test_only_a_device_that_is_not_full_is_split_over() -> None:
    cpu = torch.device("cpu")  # counted as 16 multiprocessors
    assert choose_num_splits(16, 100_000, MIN_KEYS, cpu) == 1
    assert choose_num_splits(17, 100_000, MIN_KEYS, cpu) == 1
    assert choose_num_splits(8, 100_000, MIN_KEYS, cpu) == 2
    assert choose_num_splits(3, 100_000, MIN_KEYS, cpu) == 4
    assert choose_num_splits(1, 100_000, MIN_KEYS, cpu) == MAX_SPLITS
    assert choose_num_splits(1, 2_048, MIN_KEYS, cpu) == 4
    assert choose_num_splits(1, 500, MIN_KEYS, cpu) == 1


def test_drafts_of_many_requests_are_split_as_well() -> None:
    """Their tiles are short: a multiprocessor takes several."""
    cpu = torch.device("cpu")
    assert [choose_num_splits(count, 100_000, SHORT_MIN_KEYS, cpu) for count in (1, 16, 24, 64)] == [
        MAX_SPLITS,
        4,
        2,
        1,
    ]
    assert choose_num_splits(1, LONG_CONTEXT, SHORT_MIN_KEYS, cpu) == MAX_SHORT_SPLITS
    assert choose_num_splits(1, 500, SHORT_MIN_KEYS, cpu) == 4
    for num_reqs, query_len in ((1, 2), (16, 3), (16, 6), (32, 8), (8, 26)):
        assert tile_sizes(num_reqs * query_len, num_reqs, 3, 64, 2).min_keys == SHORT_MIN_KEYS
    for num_reqs, query_len in ((16, 1), (1, 100)):
        assert tile_sizes(num_reqs * query_len, num_reqs, 3, 64, 2).min_keys == MIN_KEYS


@pytest.mark.gpu
@pytest.mark.parametrize("query_len", [1, 20, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_behind_a_long_context(
    dtype: torch.dtype, query_len: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    inputs = make_inputs(
        dtype,
        device,
        query_lens=[query_len],
        seq_lens=[8_000 + query_len],
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )
    for num_splits in (1, 2, 16):
        assert_agrees(inputs, num_splits)
