"""What the paged attention kernel reads and writes, and what its launcher refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.ops.attention_tiles import tile_sizes
from kernels.ops.paged_attention import paged_attention
from kernels.reference.paged_attention import paged_attention as reference
from kernels.specs.paged_attention import make_inputs
from tests.kernels.oracle import GuardBands
from tests.kernels.paged_attention_agreement import assert_agrees


def test_writes_where_it_is_told(device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device)
    wide = torch.full((len(inputs["query"]) + 2, 9, 70), 77.0, device=device)
    output = wide[1:-1, :, 3:67]
    assert paged_attention(**inputs, output=output) is output
    torch.testing.assert_close(output, reference(**inputs), atol=1e-5, rtol=1e-5)
    output.fill_(77.0)
    assert (wide == 77.0).all()


def test_writes_nothing_but_its_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(torch.float32, device, num_heads=14, num_kv_heads=2, head_dim=80)
    bands = GuardBands(value=77.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    output = paged_attention(**inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    torch.testing.assert_close(output, reference(**inputs))


def test_takes_slices_and_any_cache_strides(device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device)
    merged = torch.full((len(inputs["query"]), 15, 64), float("nan"), device=device)
    merged[:, :9] = inputs["query"]
    both = torch.stack((inputs["key_cache"], inputs["value_cache"]), dim=1)
    expected = reference(**inputs)
    inputs |= {"query": merged[:, :9], "key_cache": both[:, 0], "value_cache": both[:, 1]}
    assert not any(inputs[name].is_contiguous() for name in ("query", "key_cache", "value_cache"))
    torch.testing.assert_close(paged_attention(**inputs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 8])
def test_nan_in_foreign_slots_stays_there(window: int | None, device: torch.device) -> None:
    """Reused blocks hold what their last owner left; ids past a request's blocks or behind its window are not read.

    Nor is what follows a head that is no power of two, past the last of 32 keys that need no mask either.
    """
    inputs = make_inputs(
        torch.float32,
        device,
        query_lens=[1, 4, 17],
        seq_lens=[32, 20, 17],
        num_heads=3,
        num_kv_heads=1,
        head_dim=40,
        block_size=24,
        window=window,
    )
    tiles = tile_sizes(22, 3, 3, 40, 4)._replace(block_n=16)
    clean = paged_attention(**inputs, tiles=tiles)
    own = torch.zeros(inputs["key_cache"].shape[:2], dtype=torch.bool, device=device)
    lengths = zip((1, 4, 17), inputs["seq_lens"].tolist(), strict=True)
    for row, (query_len, seq_len) in zip(inputs["block_table"], lengths, strict=True):
        first = 0 if window is None else max(0, seq_len - query_len - window + 1)
        for position in range(first, seq_len):
            own[row[position // 24], position % 24] = True
        row[: first // 24] = 0
    assert not own.all()
    for name in ("key_cache", "value_cache"):
        inputs[name][~own] = float("nan")
    assert torch.equal(paged_attention(**inputs, tiles=tiles), clean)


def test_a_padding_row_is_zeros(device: torch.device) -> None:
    """A request of one row and no position fills a batch up: the null block, NaN here, is not read."""
    inputs = make_inputs(torch.float32, device, query_lens=[1, 1, 1], seq_lens=[20, 1, 1])
    expected = reference(**inputs)
    inputs["seq_lens"][1:] = 0
    inputs["block_table"][1:] = 0
    inputs["key_cache"][0] = inputs["value_cache"][0] = float("nan")
    output = paged_attention(**inputs)
    torch.testing.assert_close(output[0], expected[0], atol=1e-5, rtol=1e-5)
    assert not output[1:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3, 9, 64).double()}, "query is float64; allowed are float32, bfloat16, float16"),
        ({"query": torch.zeros(3, 576)}, r"query has shape \[3, 576\]; expected \[any, any, any\]"),
        ({"query": torch.zeros(3, 64, 9).transpose(1, 2)}, "query has stride 9 in its last dimension; expected 1"),
        ({"query": torch.zeros(3, 10, 64)}, "query has 10 heads, which is no multiple of key_cache's 3"),
        ({"query": torch.zeros(3, 3 * 129, 64)}, "129 query heads share a KV head; at most 128"),
        ({"query": torch.zeros(3, 9, 80)}, r"key_cache has shape .*; expected \[any, any, any, 80\]"),
        ({"key_cache": torch.zeros(4, 16, 3, 64).half()}, "key_cache is float16; expected float32"),
        ({"value_cache": torch.zeros(4, 16, 9, 64)}, r"value_cache has shape .*; expected \[4, 16, 3, 64\]"),
        ({"block_table": torch.zeros(2, 2).long()}, "block_table is int64; expected int32"),
        ({"block_table": torch.zeros(2, 2, 2).int()}, r"block_table has shape .*; expected \[any, any\]"),
        ({"query_start_loc": torch.zeros(2).int()}, r"query_start_loc has shape \[2\]; expected \[3\]"),
        ({"query_start_loc": torch.zeros(3).long()}, "query_start_loc is int64; expected int32"),
        ({"seq_lens": torch.zeros(3).int()}, r"seq_lens has shape \[3\]; expected \[2\]"),
        ({"seq_lens": torch.zeros(2, device="meta").int()}, "seq_lens is on meta; expected cpu"),
        ({"window": 0}, "window is 0; allowed are 1 and more, or None"),
        ({"output": torch.zeros(2, 9, 64)}, r"output has shape \[2, 9, 64\]; expected \[3, 9, 64\]"),
        ({"output": torch.zeros(3, 9, 64).half()}, "output is float16; expected float32"),
        (
            {name: torch.zeros(3, 1, 3, 257) for name in ("query", "key_cache", "value_cache")}
            | {"query": torch.zeros(3, 3, 257)},
            "query has a head_dim of 257; allowed are 1 to 256",
        ),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {
        "query": torch.zeros(3, 9, 64),
        "key_cache": torch.zeros(4, 16, 3, 64),
        "value_cache": torch.zeros(4, 16, 3, 64),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([4, 20], dtype=torch.int32),
        "scale": 0.125,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(inputs | change))


@pytest.mark.gpu
@pytest.mark.alone
def test_past_two_to_the_31_elements() -> None:
    """The blocks of a small pool, moved to the end of one whose offsets no int32 holds."""
    small = make_inputs(
        torch.float16,
        torch.device("cuda"),
        query_lens=[1, 5],
        seq_lens=[40, 70],
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )
    used = len(small["key_cache"])
    num_blocks = 2**31 // (16 * 8 * 128) + 2 * used
    large = dict(small)
    for name in ("key_cache", "value_cache"):
        large[name] = torch.zeros(num_blocks, 16, 8, 128, dtype=torch.float16, device="cuda")
        large[name][-used:] = small[name]
    large["block_table"] = small["block_table"] + (num_blocks - used)
    assert int(large["block_table"].min()) * 16 * 8 * 128 >= 2**31
    assert torch.equal(paged_attention(**large), paged_attention(**small))
    assert_agrees(large)
