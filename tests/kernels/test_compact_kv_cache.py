from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.attention.metadata import LayerCache
from backend.core.kv_format import KV_FORMATS
from kernels.ops.compact_kv_cache import cache_table
from kernels.registry import REGISTRY
from kernels.specs.compact_kv_cache import bytes_moved
from tests.kernels.kv_oracle import FORMATS
from tests.kernels.oracle import GuardBands

IMPLEMENTATIONS = ["reference", "launch"]
NUM_SLOTS = 64
Moves = list[list[tuple[int, int]]]


def implementation(name: str) -> Callable[..., None]:
    return getattr(REGISTRY["compact_kv_cache"], name)


def slots(moves: Moves, device: torch.device) -> tuple[Tensor, Tensor]:
    pairs = torch.tensor(moves, device=device)
    return pairs[..., 0].contiguous(), pairs[..., 1].contiguous()


def moved_one_by_one(caches: list[Tensor], moves: Moves) -> list[list[Tensor]]:
    """Each slot of each cache as it should be: the definition, a move at a time."""
    found = [[slot.clone() for slot in cache.flatten(0, 1)] for cache in caches]
    for row in moves:
        for source, target in row:
            for cache in found:
                cache[target] = cache[source]
    return found


# Overlaps, a move over a block's end, one that is none, padding; a chain in its place; of a row but its first.
MOVES: Moves = [
    [(17, 17), (20, 18), (21, 19), (35, 20), (37, 21)],
    [(48, 48), (49, 49), (50, 50), (51, 51), (52, 52)],
    [(0, 0)] * 5,
    [(41, 40), (42, 41), (43, 42), (44, 43), (45, 44)],
]


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (3, 64)),
        (torch.float16, (1, 2)),
        (torch.bfloat16, (5, 80)),
        (torch.int8, (3, 6)),
        (torch.uint8, (3, 32)),
        (torch.float8_e4m3fn, (8, 128)),
        (torch.float16, (3, 1)),
    ],
)
def test_slots_are_moved_in_order_and_others_left(
    which: str, block_size: int, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    torch.manual_seed(0)
    bands = GuardBands(value=7)
    caches = []
    for _ in range(3):
        cache = bands.empty((NUM_SLOTS // block_size, block_size, *shape), dtype=dtype, device=device)
        cache.view(torch.uint8).copy_(torch.randint(0, 120, cache.view(torch.uint8).shape))
        caches.append(cache)
    expected = moved_one_by_one(caches, MOVES)
    implementation(which)(caches, *slots(MOVES, device))
    bands.assert_untouched()
    for cache, by_slot in zip(caches, expected, strict=True):
        for slot, held in zip(cache.flatten(0, 1), by_slot, strict=True):
            assert torch.equal(slot.view(torch.uint8), held.view(torch.uint8))


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_all_that_layers_keep_moves_with_a_token(which: str, kv_format: str, device: torch.device) -> None:
    """Codes and scales of several layers in one call, in tensors of several sizes."""
    torch.manual_seed(1)
    layers = [LayerCache.zeros(3, 16, 3, 64, torch.float16, device, KV_FORMATS[kv_format]) for _ in range(2)]
    caches = [tensor for layer in layers for tensor in layer.tensors()]
    assert len(caches) == 8
    for cache in caches:
        cache.view(torch.uint8).copy_(torch.randint(0, 120, cache.view(torch.uint8).shape))
    expected = moved_one_by_one(caches, MOVES)
    options = {"table": cache_table(caches)} if which == "launch" else {}
    implementation(which)(caches, *slots(MOVES, device), **options)
    for cache, by_slot in zip(caches, expected, strict=True):
        assert torch.equal(cache.flatten(0, 1), torch.stack(by_slot))


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_no_rows_no_moves_and_no_caches(which: str, device: torch.device) -> None:
    cache = torch.randn(2, 16, 3, 8, device=device)
    before = cache.clone()
    none = torch.zeros(0, 5, dtype=torch.int64, device=device)
    implementation(which)([cache], none, none)
    implementation(which)([cache], none.view(5, 0), none.view(5, 0))
    implementation(which)([], *slots(MOVES, device))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_slots_may_be_columns_of_a_wider_array(which: str, device: torch.device) -> None:
    pairs = torch.tensor([[17, 19, 17, 18], [40, 45, 40, 41]], device=device)
    cache = torch.randn(4, 16, 3, 8, device=device)
    expected = moved_one_by_one([cache], [[(17, 17), (19, 18)], [(40, 40), (45, 41)]])[0]
    implementation(which)([cache], pairs[:, :2], pairs[:, 2:])
    assert torch.equal(cache.flatten(0, 1), torch.stack(expected))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"caches": [torch.zeros(16, 4, 3, 8).transpose(0, 1)]}, r"caches\[0\] has strides"),
        ({"caches": [torch.zeros(4, 16, 3, 8), torch.zeros(8, 8, 3, 8)]}, r"caches\[1\] has shape \[8, 8, 3, 8\]"),
        ({"caches": [torch.zeros(4, 16, 3, dtype=torch.int8)]}, r"a slot of caches\[0\] has 3 bytes; a multiple of 2"),
        ({"source_slots": torch.zeros(1, 2, dtype=torch.int32)}, "source_slots is int32; expected int64"),
        ({"target_slots": torch.zeros(1, 3, dtype=torch.int64)}, r"target_slots has shape \[1, 3\]; expected \[1, 2\]"),
        ({"table": torch.zeros(2, 2, dtype=torch.int64)}, r"table has shape \[2, 2\]; expected \[2, 1\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], problem: str) -> None:
    nothing = torch.zeros(1, 2, dtype=torch.int64)
    fitting = {"caches": [torch.zeros(4, 16, 3, 8)], "source_slots": nothing, "target_slots": nothing}
    with pytest.raises(ValueError, match=problem):
        implementation("launch")(**(fitting | change))


def test_bytes_are_those_of_what_moves() -> None:
    inputs = REGISTRY["compact_kv_cache"].make_inputs(torch.float16, torch.device("cpu"), num_caches=2, num_rows=1)
    inputs["source_slots"], inputs["target_slots"] = torch.tensor([[5, 9, 12]]), torch.tensor([[5, 6, 7]])
    assert bytes_moved(inputs) == 2 * 2 * 2 * (3 * 64 * 2) + 2 * 3 * 8


@pytest.mark.gpu
@pytest.mark.alone
def test_slots_past_2_31_elements(device: torch.device) -> None:
    cache = torch.zeros(2**31 // (16 * 8 * 128) + 4, 16, 8, 128, dtype=torch.float16, device=device)
    last = cache.shape[0] * 16 - 1
    cache[-1, -1] = 3.0
    implementation("launch")([cache], *slots([[(last, last - 1)]], device))
    assert (cache[-1, -2] == 3.0).all()
    assert cache[-1].float().sum() == 2 * 3.0 * 8 * 128
    assert not cache[:-1].any()
