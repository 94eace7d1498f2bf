from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check import check_op
from kernels.ops.code_launch import few_tokens_options
from kernels.ops.norm_qkv_rotary_store import norm_qkv_rotary_store
from kernels.ops.projection import Tiles
from kernels.registry import REGISTRY
from tests.kernels.code_oracle import STORED, as_matrix
from tests.kernels.linear_oracle import EVERY_CUT, SEVERAL_TOKENS, TILES, guarded, naive_project, widened
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands

OP = REGISTRY["norm_qkv_rotary_store"]
# Ten rotation pairs: one tile of 16 rows has eight, one of 32 sixteen. Columns are a multiple of no tile.
SMALL: dict[str, Any] = {"num_columns": 77, "num_heads": 2, "num_kv_heads": 1, "head_dim": 20, "num_blocks": 9}


def make_inputs(dtype: torch.dtype, device: torch.device, **sizes: Any) -> dict[str, Any]:
    return OP.make_inputs(dtype, device, **(SMALL | sizes))


def naive(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Query and both caches in float64, token by token; what is not a token's slot stays as it is."""
    key_cache, value_cache = inputs["key_cache"].double(), inputs["value_cache"].double()
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    heads = naive_project(inputs).view(len(inputs["x"]), -1, head_dim)
    num_rotated = heads.shape[1] - num_kv_heads
    queries = []
    for token, (position, slot) in enumerate(zip(inputs["positions"], inputs["slot_mapping"].tolist(), strict=True)):
        cos, sin = inputs["cos_sin_cache"][position].double().chunk(2)
        left, right = heads[token, :num_rotated].chunk(2, dim=1)
        rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=1)
        queries.append(rotated[:-num_kv_heads])
        key_cache[slot // block_size, slot % block_size] = rotated[-num_kv_heads:]
        value_cache[slot // block_size, slot % block_size] = heads[token, num_rotated:]
    return torch.stack(queries), key_cache, value_cache


def assert_right(query: Any, inputs: dict[str, Any], expected: tuple[Tensor, Tensor, Tensor]) -> None:
    tolerance = OP.tolerances[query.dtype]
    for ours, wanted in zip((query, inputs["key_cache"], inputs["value_cache"]), expected, strict=True):
        torch.testing.assert_close(ours, wanted.to(ours.dtype), atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize(("dtype", "tiles", "num_tokens"), EVERY_CUT, ids=str)
def test_everything_at_once(dtype: torch.dtype, tiles: Tiles, num_tokens: int, device: torch.device) -> None:
    inputs = make_inputs(dtype, device, num_tokens=num_tokens)
    for cache in (inputs["key_cache"], inputs["value_cache"]):
        cache.fill_(-1.0)  # what is not a token's slot keeps it
    expected = naive(inputs)
    inputs, bands = guarded(inputs)
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    query = norm_qkv_rotary_store(**inputs, tiles=tiles)
    assert query.is_contiguous()
    assert_right(query, inputs, expected)
    bands.assert_untouched()
    assert all(torch.equal(inputs[name], value) for name, value in before.items() if not name.endswith("_cache"))
    assert torch.equal(inputs["cos_sin_cache"], before["cos_sin_cache"])
    written = torch.zeros(inputs["key_cache"].shape[:2], dtype=torch.bool, device=device)
    written.view(-1)[inputs["slot_mapping"]] = True
    for name in ("key_cache", "value_cache"):
        assert (inputs[name][~written] == -1.0).all()


@pytest.mark.parametrize("which", ["launch", "reference"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 1, 128, 1), (14, 2, 2, 8), (1, 1, 6, 24), (2, 2, 48, 32)],
)
def test_any_heads_and_block_sizes(
    which: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, device: torch.device
) -> None:
    inputs = make_inputs(
        torch.float32,
        device,
        num_tokens=3,
        num_columns=24,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    expected = naive(inputs)
    query: Any = getattr(OP, which)(**inputs)
    assert query.shape == (3, num_heads, head_dim)
    assert_right(query, inputs, expected)


@pytest.mark.parametrize("num_parts", [0, 1, 5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tiles", TILES[:2], ids=str)
def test_every_part_by_itself(tiles: Tiles, bias: bool, num_parts: int, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, num_tokens=2, bias=bias, num_parts=num_parts, num_columns=64)
    inputs["eps"] = 2.5  # beside a mean square of about 9: not to be left out
    expected = naive(inputs)
    assert_right(OP.reference(**inputs), inputs, expected)
    for name in ("key_cache", "value_cache"):
        inputs[name].zero_()
    assert_right(norm_qkv_rotary_store(**inputs, tiles=tiles), inputs, expected)


@pytest.mark.parametrize("which", ["launch", "reference"])
def test_takes_caches_of_any_strides_and_rows_of_wider_tensors(which: str, device: torch.device) -> None:
    """Keys and values of a block side by side, heads before slots, as one tensor per layer might hold them."""
    inputs = make_inputs(torch.float32, device)
    expected = naive(inputs)
    num_blocks, block_size, num_kv_heads, head_dim = inputs["key_cache"].shape
    both = torch.zeros(num_blocks, 2, num_kv_heads, block_size, head_dim, device=device).transpose(2, 3)
    names = ("x", "weight", "square_sums", "cos_sin_cache")
    strided = inputs | {name: widened(inputs[name]) for name in names}
    strided |= {"key_cache": both[:, 0], "value_cache": both[:, 1]}
    assert_right(getattr(OP, which)(**strided), strided, expected)


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_writes_nothing_but_its_rows(tiles: Tiles, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(torch.float32, device)
    expected = naive(inputs)
    bands = GuardBands(value=77.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    query = norm_qkv_rotary_store(**inputs, tiles=tiles)
    monkeypatch.undo()
    bands.assert_untouched()
    assert_right(query, inputs, expected)


@pytest.mark.parametrize(("tiles", "num_tokens"), SEVERAL_TOKENS, ids=str)
def test_a_token_does_not_depend_on_its_batch(tiles: Tiles, num_tokens: int, device: torch.device) -> None:
    """Bit for bit, in the caches as well."""
    inputs = make_inputs(torch.float32, device, num_tokens=num_tokens, num_heads=1, num_kv_heads=1)
    query = norm_qkv_rotary_store(**inputs, tiles=tiles)
    per_token = ("x", "square_sums", "positions", "slot_mapping")
    for begin, end in ((0, 1), (num_tokens - 1, num_tokens), (num_tokens // 3, num_tokens - 1)):
        part = {name: value[begin:end] if name in per_token else value for name, value in inputs.items()}
        part |= {name: torch.zeros_like(inputs[name]) for name in ("key_cache", "value_cache")}
        assert torch.equal(norm_qkv_rotary_store(**part, tiles=tiles), query[begin:end])
        for name in ("key_cache", "value_cache"):
            ours, whole = (cache.flatten(0, 1)[part["slot_mapping"]] for cache in (part[name], inputs[name]))
            assert torch.equal(ours, whole)


@pytest.mark.parametrize("which", ["launch", "reference"])
def test_padding_shares_a_slot_of_the_null_block(which: str, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, num_tokens=5)
    _, _, values = naive(inputs)
    own = values.flatten(0, 1)[inputs["slot_mapping"]]
    slots = inputs["slot_mapping"].clone()
    inputs["slot_mapping"][2:] = 0
    getattr(OP, which)(**inputs)
    stored = inputs["value_cache"].flatten(0, 1).double()
    # On a GPU the writers race, and each element may be another's.
    assert ((stored[0] - own[2:]).abs() < 1e-4).any(0).all()
    assert not stored[1:16].any()
    torch.testing.assert_close(stored[slots[:2]], own[:2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("which", ["launch", "reference"])
@pytest.mark.parametrize(("num_tokens", "bits", "num_columns", "group_size", "origin"), STORED, ids=str)
def test_every_way_of_storing_codes(
    num_tokens: int, bits: int, num_columns: int, group_size: int, origin: str, which: str, device: torch.device
) -> None:
    """The pairs of a head of 80 are no multiple of a tile, those of one of 64 are."""
    codes = {"bits": bits, "num_columns": num_columns, "group_size": group_size, "origin": origin}
    heads = {"num_heads": 2 if bits == 4 else 1, "head_dim": 80 if num_columns % 64 else 64}
    inputs = make_inputs(torch.float32, device, num_tokens=num_tokens, num_parts=0, **codes | heads)
    for cache in (inputs["key_cache"], inputs["value_cache"]):
        cache.fill_(-1.0)  # what is not a token's slot keeps it
    expected = naive(as_matrix(inputs))
    query: Any = getattr(OP, which)(**inputs)
    assert_right(query, inputs, expected)


@pytest.mark.parametrize(
    ("tiles", "num_columns", "head_dim"),
    [(Tiles(1, 16, 128, 2, 1), 512, 80), (Tiles(8, 32, 128, 1, 1), 256, 20), (Tiles(16, 16, 128, 4, 1), 1024, 20)],
    ids=str,
)
def test_codes_in_full_shares(tiles: Tiles, num_columns: int, head_dim: int, device: torch.device) -> None:
    """Three tokens, in as many programs where a program takes one. Loads have no masks."""
    codes = {"bits": 4, "num_columns": num_columns, "group_size": 128, "origin": "integer"}
    heads = {"num_heads": 1, "head_dim": head_dim}
    inputs = make_inputs(torch.float32, device, num_tokens=3, num_parts=0, bias=False, **codes | heads)
    assert few_tokens_options(num_columns, tiles, 4, "none")["EVEN"]
    expected = naive(as_matrix(inputs))
    assert_right(norm_qkv_rotary_store(**inputs, tiles=tiles), inputs, expected)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES[1:])
def test_codes_over_poisoned_memory(dtype: torch.dtype, device: torch.device) -> None:
    """Every query is written, the reference's, and nothing is left of what was there."""
    codes = {"bits": 4, "num_columns": 160, "group_size": 32, "origin": "float"}
    check = check_op(OP, dtype, device, sizes={"num_tokens": 9, "num_parts": 0} | codes)
    assert check.passed, check.problem


@pytest.mark.parametrize(
    ("num_tokens", "change", "message"),
    [
        (17, {}, "x has 17 tokens; with a code_grid at most 16 are allowed"),
        (5, {"square_sums": torch.ones(5, 1)}, "square_sums are given with a code_grid; expected None"),
        (5, {"weight": torch.zeros(80, 16).int()}, r"weight has shape \[80, 16\]; expected \[80, 32\]"),
        (5, {"bias": torch.zeros(20)}, r"bias has shape \[20\]; expected \[80\]"),
    ],
)
def test_launcher_names_what_is_wrong_with_codes(num_tokens: int, change: dict[str, Any], message: str) -> None:
    codes = {"bits": 4, "num_columns": 192, "group_size": 64, "num_parts": 0}
    inputs = make_inputs(torch.float32, torch.device("cpu"), num_tokens=num_tokens, **codes)
    with pytest.raises(ValueError, match=message):
        norm_qkv_rotary_store(**(inputs | change))


@pytest.mark.parametrize("call", [norm_qkv_rotary_store, OP.reference], ids=["launch", "reference"])
def test_of_no_tokens(call: Callable[..., Tensor], device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, num_tokens=0)
    assert call(**inputs).shape == (0, 2, 20)
    assert not inputs["key_cache"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8).long()}, "x is int64; allowed are float32"),
        ({"x": torch.zeros(8, 2).t()}, "x has stride 2 in its last dimension; expected 1"),
        ({"weight": torch.zeros(20, 7)}, r"weight has shape \[20, 7\]; expected \[any, 8\]"),
        ({"weight": torch.zeros(20, 8).half()}, "weight is float16; expected float32"),
        ({"weight": torch.zeros(18, 8)}, "weight has 18 rows, which is no number of heads of 4 beside 2 key and value"),
        ({"weight": torch.zeros(16, 8)}, "weight has 16 rows, which is no number of heads of 4 beside 2 key and value"),
        ({name: torch.zeros(4, 16, 1, 5) for name in ("key_cache", "value_cache")}, "or head_dim is odd"),
        ({"key_cache": torch.zeros(4, 16, 8)}, r"key_cache has shape .*; expected \[any, any, any, any\]"),
        ({"key_cache": torch.zeros(4, 16, 2, 4).half()}, "key_cache is float16; expected float32"),
        ({"value_cache": torch.zeros(4, 8, 2, 4)}, r"value_cache has shape .*; expected \[4, 16, 2, 4\]"),
        ({"positions": torch.zeros(2).int()}, "positions is int32; expected int64"),
        ({"positions": torch.zeros(3).long()}, r"positions has shape \[3\]; expected \[2\]"),
        ({"slot_mapping": torch.zeros(2).int()}, "slot_mapping is int32; expected int64"),
        ({"slot_mapping": torch.zeros(2, device="meta").long()}, "slot_mapping is on meta; expected cpu"),
        ({"cos_sin_cache": torch.zeros(8, 2)}, r"cos_sin_cache has shape \[8, 2\]; expected \[any, 4\]"),
        ({"cos_sin_cache": torch.zeros(8, 4).half()}, "cos_sin_cache is float16; expected float32"),
        ({"square_sums": torch.zeros(3, 1)}, r"square_sums has shape \[3, 1\]; expected \[2, any\]"),
        ({"bias": torch.zeros(8)}, r"bias has shape \[8\]; expected \[20\]"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {
        "x": torch.zeros(2, 8),
        "weight": torch.zeros(20, 8),
        "positions": torch.arange(2),
        "cos_sin_cache": torch.zeros(8, 4),
        "key_cache": torch.zeros(4, 16, 2, 4),
        "value_cache": torch.zeros(4, 16, 2, 4),
        "slot_mapping": torch.arange(2),
    }
    with pytest.raises(ValueError, match=message):
        norm_qkv_rotary_store(**(inputs | change))


@pytest.mark.gpu
@pytest.mark.alone
def test_a_cache_past_two_to_the_31_elements(device: torch.device) -> None:
    num_blocks = 2**31 // (16 * 8 * 128) + 2
    small = make_inputs(torch.float16, device, num_tokens=3, num_heads=32, num_kv_heads=8, head_dim=128)
    small["slot_mapping"] = torch.tensor([47, 0, 32], device=device)
    _, key_cache, value_cache = naive(small)
    shape = (num_blocks, 16, 8, 128)
    large = {name: torch.zeros(shape, dtype=torch.float16, device=device) for name in ("key_cache", "value_cache")}
    slots = torch.tensor([num_blocks * 16 - 1, 0, (num_blocks - 1) * 16], device=device)
    assert int(slots[2]) * 8 * 128 >= 2**31
    norm_qkv_rotary_store(**(small | large | {"slot_mapping": slots}))
    for ours, wanted in ((large["key_cache"], key_cache), (large["value_cache"], value_cache)):
        torch.testing.assert_close(ours[-1], wanted[2].half(), atol=1e-4, rtol=2e-3)
        torch.testing.assert_close(ours[0], wanted[0].half(), atol=1e-4, rtol=2e-3)
        assert not ours[1:100].any()
