"""Rows that are nodes of a tree of drafts: what they see of it, and how far a window reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops.attention_tiles import tile_sizes
from kernels.ops.paged_attention import paged_attention
from kernels.reference.paged_attention import paged_attention as reference
from kernels.registry import REGISTRY
from kernels.specs.paged_attention import flops, make_inputs
from tests.kernels.kv_oracle import FORMATS, decoded
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands
from tests.kernels.paged_attention_agreement import short_shares

CPU = torch.device("cpu")
# A tree, a single row, a prompt's chunk, no rows, a tree without context, one of 64 nodes over more than a tile.
MIXED: dict[str, Any] = {
    "query_lens": [1, 9, 7, 0, 5, 64, 1],
    "seq_lens": [20, 41, 30, 0, 5, 130, 3],
    "trees": [1, 4, 5, 6],
}
SMALL: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32}
IMPLEMENTATIONS = [reference, paged_attention]


def naive_trees(inputs: dict[str, Any]) -> Tensor:
    """The definition in float64, row by row: the positions of what a row sees are counted up one by one."""
    query, window = inputs["query"].double().cpu(), inputs["window"]
    keys, values = (decoded(inputs[f"{name}_cache"], inputs[f"{name}_scales"]) for name in ("key", "value"))
    group, block_size = query.shape[1] // keys.shape[2], keys.shape[1]
    starts, output = inputs["query_start_loc"].tolist(), torch.zeros_like(query)
    for r, seq_len in enumerate(inputs["seq_lens"].tolist()):
        table, num_computed = inputs["block_table"][r].tolist(), seq_len - (starts[r + 1] - starts[r])
        for row in range(starts[r], starts[r + 1]):
            bits, begin = int(inputs["tree_mask"][row]), int(inputs["tree_starts"][r])
            if bits == -1:
                seen = list(range(num_computed + row - starts[r] + 1))
            else:
                seen = list(range(begin)) + [begin + j for j in range(64) if bits % 2**64 // 2**j % 2]
            seen = seen[-window:] if window else seen
            slots = [(table[j // block_size], j % block_size) for j in seen]
            key, value = (torch.stack([cache[slot] for slot in slots]) for cache in (keys, values))
            for head in range(query.shape[1]):
                weights = torch.softmax(inputs["scale"] * (key[:, head // group] @ query[row, head]), dim=0)
                output[row, head] = weights @ value[:, head // group]
    return output


def assert_near(output: Tensor, expected: Tensor) -> None:
    tolerance = REGISTRY["paged_attention"].tolerances[output.dtype]
    torch.testing.assert_close(output, expected.to(output), atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("window", [None, 1, 3, 12, 40])
def test_reference_follows_the_definition(window: int | None) -> None:
    inputs = make_inputs(torch.float32, CPU, **MIXED, **SMALL, window=window)
    assert_near(reference(**inputs), naive_trees(inputs))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("window", [None, 3])
def test_reference_over_a_quantized_cache(window: int | None, kv_format: str) -> None:
    inputs = make_inputs(torch.float32, CPU, **MIXED, **SMALL, window=window, kv_dtype=kv_format)
    assert_near(reference(**inputs), naive_trees(inputs))


@pytest.mark.parametrize("window", [None, 1, 3, 12, 40])
def test_kernel_agrees_in_mixed_batches(window: int | None, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, **MIXED, **SMALL, window=window)
    bands = GuardBands()
    inputs |= {name: bands.wrap(inputs[name]) for name in ("query", "key_cache", "value_cache")}
    assert tile_sizes(87, 7, 3, 32, 4).block_q < 64  # so that a tree takes more than one tile
    assert_near(paged_attention(**inputs), naive_trees(inputs).to(device))
    bands.assert_untouched()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (4, 4, 80)])
def test_kernel_agrees_over_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    inputs = make_inputs(dtype, device, query_lens=[1, 12], seq_lens=[20, 33], trees=[1], **heads)
    assert_near(paged_attention(**inputs), reference(**inputs))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("window", [None, 3])
def test_kernel_agrees_over_a_quantized_cache(window: int | None, kv_format: str, device: torch.device) -> None:
    lengths: dict[str, Any] = {"query_lens": [1, 9, 7], "seq_lens": [20, 41, 30], "trees": [1]}
    inputs = make_inputs(torch.float32, device, **lengths, **SMALL, window=window, kv_dtype=kv_format)
    assert_near(paged_attention(**inputs), reference(**inputs))


@pytest.mark.parametrize("window", [None, 3, 40])
def test_shares_of_keys_add_up(window: int | None, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, **MIXED, **SMALL, window=window)
    assert_near(paged_attention(**inputs, tiles=short_shares(inputs), num_splits=8), reference(**inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3, 500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_behind_long_contexts(dtype: torch.dtype, window: int | None, device: torch.device) -> None:
    inputs = make_inputs(
        dtype,
        device,
        query_lens=[1, 26, 64, 300],
        seq_lens=[900, 8_026, 1_064, 1_000],
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        trees=[1, 2],
        window=window,
    )
    for num_splits in (None, 1, 16):
        assert_near(paged_attention(**inputs, num_splits=num_splits), reference(**inputs))


@pytest.mark.parametrize("attend", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 5])
def test_a_chain_is_causal_attention(attend: Any, window: int | None, device: torch.device) -> None:
    """The longest there can be, whose last row has all 64 bits."""
    inputs = make_inputs(torch.float32, device, query_lens=[64, 2], seq_lens=[75, 9], window=window, **SMALL)
    chain = [2**i - 1 for i in range(1, 64)] + [-1]
    trees = {
        "tree_mask": torch.tensor([*chain, 1, 3], device=device),
        "tree_starts": torch.tensor([11, 7], dtype=torch.int32, device=device),
    }
    torch.testing.assert_close(attend(**(inputs | trees)), attend(**inputs), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attend", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 3, 12])
def test_a_level_at_a_time_is_the_tree_at_once(attend: Any, window: int | None, device: torch.device) -> None:
    """Keys of the levels above are there already, and the nodes of a level the last rows; also of several trees side by side."""
    inputs = make_inputs(torch.float32, device, query_lens=[6, 6], seq_lens=[26, 16], window=window, **SMALL)
    # 0 and 1 have no parent; 2, 3 below 0; 4 below 1; 5 below 3.
    bits = torch.tensor([0b1, 0b10, 0b101, 0b1001, 0b10010, 0b101001], device=device)
    starts = torch.tensor([20, 10], dtype=torch.int32, device=device)
    whole = inputs | {"tree_mask": bits.repeat(2), "tree_starts": starts}
    expected = attend(**whole)
    assert_near(expected, naive_trees(whole).to(device))
    for begin, end in ((0, 2), (2, 5), (5, 6)):
        rows = [*range(begin, end), *range(6 + begin, 6 + end)]
        level = whole | {
            "query": inputs["query"][rows],
            "query_start_loc": (torch.arange(3, dtype=torch.int32) * (end - begin)).to(device),
            "seq_lens": starts + end,
            "tree_mask": bits[begin:end].repeat(2),
        }
        torch.testing.assert_close(attend(**level), expected[rows], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attend", IMPLEMENTATIONS)
def test_a_request_without_a_tree_has_what_it_has_alone(attend: Any, device: torch.device) -> None:
    """Bit for bit, beside a request with one."""
    inputs = make_inputs(torch.float32, device, query_lens=[9, 40], seq_lens=[30, 90], trees=[0], **SMALL)
    without: dict[str, Any] = inputs | {"tree_mask": None, "tree_starts": None}
    with_tree, plain = attend(**inputs), attend(**without)
    assert torch.equal(with_tree[9:], plain[9:])
    assert not torch.allclose(with_tree[:9], plain[:9], atol=1e-2)


def test_arguments_that_do_not_fit_are_refused(device: torch.device) -> None:
    inputs: dict[str, Any] = make_inputs(torch.float32, device, query_lens=[3], seq_lens=[9], trees=[0], **SMALL)
    without_starts: dict[str, Any] = inputs | {"tree_starts": None}
    with pytest.raises(ValueError, match="tree_mask and tree_starts go together"):
        paged_attention(**without_starts)
    with pytest.raises(ValueError, match=r"tree_mask has shape \[2\]; expected \[3\]"):
        paged_attention(**(inputs | {"tree_mask": inputs["tree_mask"][:2]}))
    with pytest.raises(ValueError, match="tree_starts is int64; expected int32"):
        paged_attention(**(inputs | {"tree_starts": inputs["tree_starts"].long()}))


def test_flops_count_what_a_node_sees() -> None:
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    inputs = make_inputs(torch.float16, CPU, query_lens=[3, 2], seq_lens=[13, 8], trees=[0], **sizes)
    inputs["tree_mask"] = torch.tensor([1, 3, 5, -1, -1])
    assert flops(inputs) == 4 * ((11 + 12 + 12) + (7 + 8)) * 4 * 8
    assert flops(inputs | {"window": 11}) == 4 * ((11 + 11 + 11) + (7 + 8)) * 4 * 8
