from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

import kernels.reference.paged_attention as module
from kernels.reference.paged_attention import paged_attention
from kernels.specs.paged_attention import make_inputs as make_paged_attention_inputs
from tests.kernels.oracle import HEAD_DIMS, HEADS, GuardBands, chunked, naive_attention, start_loc

# Decode, verification of five, chunk and whole prompt, at lengths on both sides of a block.
QUERY_LENS = [1, 1, 1, 1, 1, 5, 5, 20, 17, 0, 2]
SEQ_LENS = [1, 15, 16, 17, 127, 17, 60, 47, 17, 33, 2]


def cpu_inputs(dtype: torch.dtype = torch.float32, **sizes: Any) -> dict[str, Any]:
    return make_paged_attention_inputs(dtype, torch.device("cpu"), **sizes)


def assert_right(inputs: dict[str, Any], atol: float = 1e-5) -> None:
    output = paged_attention(**inputs)
    assert output.dtype == inputs["query"].dtype
    torch.testing.assert_close(output.double(), naive_attention(**inputs), atol=atol, rtol=1e-5 if atol < 1e-3 else 0)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_any_mix_of_lengths(head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    inputs = cpu_inputs(
        query_lens=QUERY_LENS,
        seq_lens=SEQ_LENS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    bands = GuardBands()
    for name in ("query", "key_cache", "value_cache"):
        inputs[name] = bands.wrap(inputs[name])
    assert_right(inputs)
    bands.assert_untouched()


@pytest.mark.parametrize("window", [None, 1, 8, 24])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 128])
def test_any_block_size(block_size: int, window: int | None) -> None:
    assert_right(cpu_inputs(query_lens=QUERY_LENS, seq_lens=SEQ_LENS, block_size=block_size, window=window))


@pytest.mark.parametrize("seq_len", [1, 16, 1000])
@pytest.mark.parametrize("num_reqs", [1, 3])
def test_decodes_of_one_length_need_no_mask(num_reqs: int, seq_len: int) -> None:
    assert_right(cpu_inputs(query_lens=[1] * num_reqs, seq_lens=[seq_len] * num_reqs))


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([], []), ([0], [0]), ([0, 0], [5, 0]), ([1, 0], [5, 0]), ([0, 1, 0, 3], [7, 9, 0, 3]), ([1], [1])],
)
def test_empty_and_one_token_requests(query_lens: list[int], seq_lens: list[int]) -> None:
    assert_right(cpu_inputs(query_lens=query_lens, seq_lens=seq_lens))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("query_lens", [[1, 1], [5, 1]])
def test_half_precision_rounds_at_the_end_only(dtype: torch.dtype, atol: float, query_lens: list[int]) -> None:
    inputs = cpu_inputs(dtype, query_lens=query_lens, seq_lens=[40, 7])
    assert_right(inputs, atol)
    exact = paged_attention(
        **{k: v.float() if k in ("query", "key_cache", "value_cache") else v for k, v in inputs.items()}
    )
    assert torch.equal(paged_attention(**inputs), exact.to(dtype))


@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [1, 9, 0, 3]])
@pytest.mark.parametrize("window", [None, 8])
def test_inputs_are_left_as_they_were(query_lens: list[int], window: int | None) -> None:
    inputs = cpu_inputs(query_lens=query_lens, seq_lens=[33, 20, 4, 17], window=window)
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    paged_attention(**inputs)
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


@pytest.mark.parametrize("query_lens", [[1, 6, 1], [1] * 8])
def test_query_may_be_a_slice_of_a_merged_projection(query_lens: list[int]) -> None:
    inputs = cpu_inputs(query_lens=query_lens, seq_lens=[20] * len(query_lens))
    expected = paged_attention(**inputs)
    merged = torch.full((8, 15, 64), float("nan"))
    merged[:, :9] = inputs["query"]
    inputs["query"] = merged[:, :9]
    assert torch.equal(paged_attention(**inputs), expected)


def test_rows_past_the_last_request_are_ignored() -> None:
    inputs = cpu_inputs(query_lens=[1, 1], seq_lens=[20, 6])
    expected = paged_attention(**inputs)
    inputs["query"] = torch.cat((inputs["query"], torch.full((3, 9, 64), float("nan"))))
    output = paged_attention(**inputs)
    assert output.shape == (5, 9, 64)
    torch.testing.assert_close(output[:2], expected)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 4, 17]])
def test_nan_in_foreign_slots_stays_there(query_lens: list[int], window: int | None) -> None:
    """Reused blocks hold what their last owner left, and the null block what padding wrote."""
    inputs = cpu_inputs(query_lens=query_lens, seq_lens=[33, 20, 17], window=window)
    clean = paged_attention(**inputs)
    own = torch.zeros(inputs["key_cache"].shape[:2], dtype=torch.bool)
    for row, seq_len in zip(inputs["block_table"].tolist(), inputs["seq_lens"].tolist(), strict=True):
        for position in range(seq_len):
            own[row[position // 16], position % 16] = True
    assert not own.all()
    for name in ("key_cache", "value_cache"):
        inputs[name][~own] = float("nan")
    assert torch.equal(paged_attention(**inputs), clean)


def test_blocks_behind_the_window_may_be_given_up() -> None:
    inputs = cpu_inputs(query_lens=[1, 1, 4], seq_lens=[50, 90, 70], window=20)
    kept = paged_attention(**inputs)
    inputs["block_table"][0, : (50 - 20) // 16] = 0
    inputs["block_table"][1, : (90 - 20) // 16] = 0
    inputs["block_table"][2, : (70 - 4 + 1 - 20) // 16] = 0
    inputs["key_cache"][0] = inputs["value_cache"][0] = float("nan")
    torch.testing.assert_close(paged_attention(**inputs), kept)


@pytest.mark.parametrize("window", [8, 24])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_window_counts_the_token_itself(window: int, chunk: int) -> None:
    """Equal scores and one-hot values show each position's weight; every way to cut a prompt is the same."""
    for length in (window - 1, window, window + 1, 3 * window + 5):
        inputs = cpu_inputs(query_lens=[length], seq_lens=[length], num_heads=2, num_kv_heads=1, head_dim=80)
        inputs["query"].zero_()
        table = inputs["block_table"][0]
        for position in range(length):
            inputs["value_cache"][table[position // 16], position % 16, 0] = torch.eye(80)[position]
        query_lens, seq_lens = chunked(length, chunk)
        inputs |= {
            "block_table": table.expand(len(seq_lens), -1).contiguous(),
            "query_start_loc": start_loc(query_lens, torch.device("cpu")),
            "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
            "window": window,
        }
        expected = torch.zeros(length, 80)
        for row in range(length):
            expected[row, max(0, row - window + 1) : row + 1] = 1 / min(row + 1, window)
        for head in paged_attention(**inputs).unbind(1):
            torch.testing.assert_close(head, expected)
            assert torch.equal(head != 0, expected != 0)


def test_decodes_of_unlike_lengths_are_not_padded_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(wraps=module._attend_decodes)
    monkeypatch.setattr(module, "_attend_decodes", spy)
    monkeypatch.setattr(module, "MAX_GATHER_BYTES", 100 * 3 * 64 * 4)  # a hundred tokens
    assert_right(cpu_inputs(query_lens=[1, 1, 4, 1, 1], seq_lens=[20, 90, 8, 30, 31]))
    assert [call.args[5] for call in spy.call_args_list] == [[90], [31, 30, 20]]


def test_one_batch_of_decodes_is_attended_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(wraps=module._attend_decodes)
    monkeypatch.setattr(module, "_attend_decodes", spy)
    inputs = cpu_inputs(query_lens=[1] * 4, seq_lens=[20, 90, 30, 31])
    assert_right(inputs)
    assert spy.call_count == 1
    assert spy.call_args.args[0] is inputs["query"]


@pytest.mark.parametrize("window", [None, 5, 40])
def test_a_long_chunk_is_attended_in_tiles(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(module, "QUERY_TILE", 8)
    assert_right(cpu_inputs(query_lens=[20], seq_lens=[70], window=window))
    num_keys = [call.args[1].shape[2] for call in spy.call_args_list]
    assert num_keys == ([58, 66, 70] if window is None else [window + 7, window + 7, window + 3])
