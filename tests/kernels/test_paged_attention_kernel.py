"""The paged attention kernel over lengths, heads, blocks and windows."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.ops.attention_tiles import tile_sizes
from kernels.ops.paged_attention import paged_attention
from kernels.specs.paged_attention import make_inputs
from tests.kernels.oracle import HEAD_DIMS, HEADS, chunked, in_turn, start_loc
from tests.kernels.paged_attention_agreement import assert_agrees, assert_agrees_between_bands


@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_heads", "num_kv_heads"),
    in_turn([(64, 9, 3), (128, 32, 8), (80, 14, 2), (96, 1, 1), (64, 24, 1), (16, 33, 1), (7, 2, 1)]),
)
def test_any_mix_of_lengths(
    dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    inputs = make_inputs(
        dtype,
        device,
        query_lens=[1, 5, 0, 1, 7],
        seq_lens=[17, 16, 0, 1, 70],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    assert_agrees_between_bands(inputs)


# Float32 kernels take long to compile, so the whole matrix is bfloat16's.
FULL_SIZE = [
    *itertools.product([torch.bfloat16], HEAD_DIMS, HEADS),
    *itertools.product([torch.float32, torch.float16], [64, 80], [(9, 3), (14, 2)]),
    (torch.float32, 128, (32, 8)),
    (torch.float32, 256, (1, 1)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim", "heads"), FULL_SIZE)
def test_any_mix_of_lengths_at_full_size(
    dtype: torch.dtype, head_dim: int, heads: tuple[int, int], device: torch.device
) -> None:
    lengths = [1, 15, 16, 17, 127, 1000]
    inputs = make_inputs(
        dtype,
        device,
        query_lens=[1] * 6 + lengths + [5, 5, 300],
        seq_lens=lengths * 2 + [127, 1000, 1000],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
    )
    assert_agrees_between_bands(inputs)
    decodes = inputs | {
        "query": inputs["query"][:6],
        "query_start_loc": inputs["query_start_loc"][:7],
        "block_table": inputs["block_table"][:6],
        "seq_lens": inputs["seq_lens"][:6],
    }
    assert_agrees(decodes)


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32])
def test_any_block_size(block_size: int, window: int | None, device: torch.device) -> None:
    inputs = make_inputs(
        torch.float32,
        device,
        query_lens=[1, 5, 1],
        seq_lens=[33, 9, 150],
        num_heads=3,
        num_kv_heads=1,
        head_dim=32,
        block_size=block_size,
        window=window,
    )
    assert tile_sizes(7, 3, 3, 32, 4).block_n < 150  # so that a request takes more than one iteration
    assert_agrees(inputs)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([], []), ([0], [0]), ([0, 0], [5, 0]), ([1, 0], [5, 0]), ([0, 1, 0, 3], [7, 9, 0, 3]), ([1], [1])],
)
def test_empty_and_one_token_requests(query_lens: list[int], seq_lens: list[int], device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, query_lens=query_lens, seq_lens=seq_lens)
    output = assert_agrees(inputs)
    assert output.shape == (sum(query_lens), 9, 64)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("window", [8, 24])
def test_window_counts_the_token_itself(window: int, chunk: int, device: torch.device) -> None:
    """Equal scores and one-hot values show each position's weight; every way to cut a prompt is the same."""
    # Token by token, a long prompt's first requests are all of a shorter one's.
    for length in (window - 1, window, window + 1, 3 * window + 5)[-1 if chunk == 1 else 0 :]:
        inputs = make_inputs(
            torch.float32, device, query_lens=[length], seq_lens=[length], num_heads=2, num_kv_heads=1, head_dim=80
        )
        inputs["query"].zero_()
        table = inputs["block_table"][0]
        for position in range(length):
            one_hot = torch.eye(80, device=device)[position]
            inputs["value_cache"][table[position // 16], position % 16, 0] = one_hot
        query_lens, seq_lens = chunked(length, chunk)
        inputs |= {
            "block_table": table.expand(len(seq_lens), -1).contiguous(),
            "query_start_loc": start_loc(query_lens, device),
            "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=device),
            "window": window,
        }
        expected = torch.zeros(length, 80, device=device)
        for row in range(length):
            expected[row, max(0, row - window + 1) : row + 1] = 1 / min(row + 1, window)
        for head in paged_attention(**inputs).unbind(1):
            torch.testing.assert_close(head, expected)
            assert torch.equal(head != 0, expected != 0)
