"""QKV products of few tokens with weights in 8 bits and NormalFloat4: rotation and the cache's update in their kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.check import check_op
from kernels.ops.byte_qkv_rotary_store import byte_qkv_rotary_store
from kernels.ops.nf4_qkv_rotary_store import nf4_qkv_rotary_store
from kernels.ops.projection import Tiles
from kernels.registry import REGISTRY
from tests.kernels.oracle import KERNEL_DTYPES
from tests.kernels.stored_oracle import stored_product

E4M3 = torch.float8_e4m3fn
NAMES = {"byte_qkv_rotary_store": byte_qkv_rotary_store, "nf4_qkv_rotary_store": nf4_qkv_rotary_store}
names = pytest.mark.parametrize("name", NAMES)
# Ten rotation pairs: one tile of 16 rows has eight, one of 32 sixteen.
SMALL: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 20, "num_blocks": 9}
CUTS = [
    (1, None, 192, {}),
    (5, None, 1088, {"num_heads": 3, "head_dim": 16}),
    (9, Tiles(8, 32, 128, 1, 1), 64, {}),
    (16, Tiles(16, 16, 128, 4, 1), 1024, {"block_size": 24}),
    (3, Tiles(1, 16, 128, 2, 1), 512, {"num_kv_heads": 2, "head_dim": 6}),
]


def assert_right(name: str, inputs: dict[str, Any], tiles: Tiles | None, *, by_reference: bool = False) -> None:
    """Query and both caches in float64, token by token; what is not a token's slot stays as it is."""
    caches = {cache: inputs[cache].fill_(-1.0).double().cpu() for cache in ("key_cache", "value_cache")}
    _, block_size, num_kv_heads, head_dim = inputs["key_cache"].shape
    heads = stored_product(inputs).unflatten(1, (-1, head_dim))
    num_rotated, expected = heads.shape[1] - num_kv_heads, []
    for token, slot in enumerate(inputs["slot_mapping"].tolist()):
        cos, sin = inputs["cos_sin_cache"][inputs["positions"][token]].double().cpu().chunk(2)
        left, right = heads[token, :num_rotated].chunk(2, dim=1)
        rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=1)
        expected.append(rotated[:-num_kv_heads])
        caches["key_cache"][slot // block_size, slot % block_size] = rotated[-num_kv_heads:]
        caches["value_cache"][slot // block_size, slot % block_size] = heads[token, num_rotated:]
    query: Any = REGISTRY[name].reference(**inputs) if by_reference else NAMES[name](**inputs, tiles=tiles)
    assert query.is_contiguous()
    tolerance = REGISTRY[name].tolerances[query.dtype]
    actual = (query, inputs["key_cache"], inputs["value_cache"])
    for ours, wanted in zip(actual, (torch.stack(expected), *caches.values()), strict=True):
        torch.testing.assert_close(ours.double().cpu(), wanted, atol=tolerance.atol, rtol=tolerance.rtol)


@names
@pytest.mark.parametrize(("num_tokens", "tiles", "num_columns", "sizes"), CUTS, ids=str)
def test_every_cut(
    name: str, num_tokens: int, tiles: Tiles | None, num_columns: int, sizes: dict[str, int], device: torch.device
) -> None:
    sizes = SMALL | sizes | {"num_tokens": num_tokens, "num_columns": num_columns}
    for by_reference in (False, True):
        inputs = REGISTRY[name].make_inputs(torch.float32, device, **sizes)
        assert_right(name, inputs, tiles, by_reference=by_reference)


def test_integers(device: torch.device) -> None:
    inputs = REGISTRY["byte_qkv_rotary_store"].make_inputs(torch.float32, device, **SMALL, to=torch.int8, bias=False)
    assert_right("byte_qkv_rotary_store", inputs, None)


@names
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_over_poisoned_memory(name: str, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    check = check_op(REGISTRY[name], dtype, device, sizes=SMALL | {"num_tokens": num_tokens})
    assert check.passed, check.problem


@names
def test_caches_of_any_strides(name: str, device: torch.device) -> None:
    inputs = REGISTRY[name].make_inputs(torch.float32, device, **SMALL)
    for cache in ("key_cache", "value_cache"):
        inputs[cache] = inputs[cache].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    assert_right(name, inputs, None)


@names
def test_of_no_tokens(name: str, device: torch.device) -> None:
    for call in (NAMES[name], REGISTRY[name].reference):
        query: Any = call(**REGISTRY[name].make_inputs(torch.float32, device, **SMALL, num_tokens=0))
        assert query.shape == (0, 2, 20)


@names
@pytest.mark.parametrize(
    ("sizes", "change", "message"),
    [
        ({"num_tokens": 17}, {}, "x has 17 tokens; at most 16 are allowed"),
        ({}, {"bias": torch.zeros(21)}, r"bias has shape \[21\]; expected \[80\]"),
        ({}, {"positions": torch.zeros(4).long()}, r"positions has shape \[4\]; expected \[5\]"),
        ({}, {"slot_mapping": torch.zeros(5).int()}, "slot_mapping is int32; expected int64"),
        ({}, {"key_cache": torch.zeros(9, 16, 2, 20)}, "value_cache has shape"),
        ({"head_dim": 16, "num_heads": 3}, {"key_cache": torch.zeros(9, 16, 1, 20)}, "value_cache has shape"),
    ],
)
def test_launchers_name_what_is_wrong(name: str, sizes: dict[str, int], change: dict[str, Any], message: str) -> None:
    inputs = REGISTRY[name].make_inputs(torch.float32, torch.device("cpu"), **SMALL | sizes)
    with pytest.raises(ValueError, match=message):
        NAMES[name](**(inputs | change))


@names
def test_rows_that_are_no_heads_are_refused(name: str) -> None:
    inputs = REGISTRY[name].make_inputs(torch.float32, torch.device("cpu"), **SMALL)
    caches = {cache: torch.zeros(9, 16, 2, 20) for cache in ("key_cache", "value_cache")}
    with pytest.raises(ValueError, match="weight has 80 rows, which is no number of heads of 20 beside 2"):
        NAMES[name](**(inputs | caches))
