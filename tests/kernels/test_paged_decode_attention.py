from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops import arrivals
from kernels.ops.decode_cut import Cut, choose_cut
from kernels.ops.paged_decode_attention import paged_decode_attention
from kernels.reference.paged_decode_attention import paged_decode_attention as reference
from kernels.registry import REGISTRY
from kernels.specs.paged_decode_attention import make_inputs
from tests.kernels.oracle import HEAD_DIMS, HEADS, GuardBands, in_turn, naive_attention

CPU = torch.device("cpu")
# Whole requests; shares that a request fills or not; the least that there is, some or many of it per request.
CUTS = [Cut(1, 64, 64, 4), Cut(2, 64, 32, 4), Cut(8, 16, 16, 4), Cut(24, 16, 16, 4), Cut(64, 16, 16, 4, 2)]
SMALL: dict[str, Any] = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 32}


def naive(inputs: dict[str, Any]) -> Tensor:
    """The definition in float64; zeros for requests without positions."""
    rows = [r for r, seq_len in enumerate(inputs["seq_lens"].tolist()) if seq_len]
    output = torch.zeros(inputs["query"].shape, dtype=torch.float64)
    present = inputs | {name: inputs[name][rows] for name in ("query", "block_table", "seq_lens")}
    output[rows] = naive_attention(**present, query_start_loc=torch.arange(len(rows) + 1))
    return output.to(inputs["query"].device)


def assert_close(output: Tensor, expected: Tensor) -> None:
    tolerance = REGISTRY["paged_decode_attention"].tolerances[output.dtype]
    torch.testing.assert_close(output, expected.to(output.dtype), atol=tolerance.atol, rtol=tolerance.rtol)


def attend(inputs: dict[str, Any], cut: Cut | None = None) -> Tensor:
    """Counters are found at zero by the next launch, whatever its cut."""
    output = paged_decode_attention(**inputs, cut=cut)
    assert all(not counters.any() for counters in arrivals._COUNTERS[output.device])
    return output


@pytest.mark.parametrize(
    ("dtype", "num_heads", "num_kv_heads", "head_dim"),
    in_turn([(9, 3, 64), (32, 8, 128), (14, 2, 80), (1, 1, 16), (24, 1, 256), (33, 1, 7), (4, 2, 96)]),
)
def test_any_mix_of_lengths(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> None:
    """Also of requests that take one share of several, and of one that is padding."""
    inputs = make_inputs(
        dtype,
        device,
        seq_lens=[17, 0, 1, 70],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    bands = GuardBands()
    for name in ("query", "key_cache", "value_cache"):
        inputs[name] = bands.wrap(inputs[name])
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    expected = naive(inputs)
    assert choose_cut(4 * num_kv_heads, 80, head_dim, device).num_splits == 1
    for cut in (CUTS[2], None):
        assert_close(attend(inputs, cut), expected)
    assert_close(reference(**inputs), expected)
    bands.assert_untouched()
    assert all(torch.allclose(inputs[name], value, rtol=0, atol=0) for name, value in before.items())


@pytest.mark.parametrize("cut", CUTS[:3], ids=str)
def test_lengths_that_end_on_and_off_the_bounds_of_shares(cut: Cut, device: torch.device) -> None:
    """A request just below, at and above one share and two, the least share, and as many shares as there are."""
    bounds = {cut.block_n, 2 * cut.block_n, cut.min_keys, cut.num_splits * cut.block_n, cut.num_splits * cut.min_keys}
    seq_lens = sorted({1, 130, *(bound + off for bound in bounds for off in (-1, 0, 1))})
    for window in (None, 50):
        inputs = make_inputs(torch.float32, device, seq_lens=seq_lens, window=window, **SMALL)
        assert_close(attend(inputs, cut), reference(**inputs))


def test_all_shares_of_a_cut_are_taken(device: torch.device) -> None:
    """As many as there may be, 16 of 16 keys, and of requests that leave the last ones empty: 9 of 32, and 11 of 16.

    Parts of such long heads are added up four at a time, the last of them fewer.
    """
    for seq_len in (256, 257, 167):
        inputs = make_inputs(torch.float32, device, seq_lens=[seq_len], num_heads=3, num_kv_heads=1, head_dim=256)
        assert_close(attend(inputs, Cut(16, 16, 16, 4)), reference(**inputs))


@pytest.mark.parametrize(("block_size", "window"), [(1, None), (8, 11), (16, None), (24, 11), (256, None), (256, 11)])
def test_any_block_size(block_size: int, window: int | None, device: torch.device) -> None:
    inputs = make_inputs(
        torch.float32, device, seq_lens=[33, 9, 0, 70, 257], block_size=block_size, window=window, **SMALL
    )
    expected = naive(inputs)
    for cut in CUTS[:3]:
        assert_close(attend(inputs, cut), expected)


@pytest.mark.parametrize("cut", CUTS[:3], ids=str)
@pytest.mark.parametrize("window", [8, 24])
def test_window_counts_the_token_itself(window: int, cut: Cut, device: torch.device) -> None:
    """Equal scores and one-hot values show each position's weight."""
    lengths = [1, window - 1, window, window + 1, 3 * window + 5]
    inputs = make_inputs(
        torch.float32, device, seq_lens=lengths, num_heads=2, num_kv_heads=1, head_dim=80, window=window
    )
    inputs["query"].zero_()
    expected = torch.zeros(len(lengths), 80, device=device)
    for row, (table, length) in enumerate(zip(inputs["block_table"], lengths, strict=True)):
        for position in range(length):
            one_hot = torch.eye(80, device=device)[position]
            inputs["value_cache"][table[position // 16], position % 16, 0] = one_hot
        expected[row, max(0, length - window) : length] = 1 / min(length, window)
    for head in (*attend(inputs, cut).unbind(1), *reference(**inputs).unbind(1)):
        torch.testing.assert_close(head, expected)
        assert torch.equal(head != 0, expected != 0)


@pytest.mark.parametrize(("cut", "window"), [(CUTS[0], None), (CUTS[1], 20), (CUTS[2], None), (CUTS[2], 20)], ids=str)
def test_nan_in_foreign_slots_stays_there(cut: Cut, window: int | None, device: torch.device) -> None:
    """The null block is NaN, and so is all that a request has not written; a padding row is zeros all the same.

    Ids past a request's blocks and behind its window lead to blocks of NaN too, and what follows a head that is no power
    of two may be NaN.
    """
    sizes = SMALL | {"head_dim": 24}
    inputs = make_inputs(torch.float32, device, seq_lens=[33, 0, 20, 17, 64, 1], window=window, **sizes)
    clean = attend(inputs, cut)
    table = inputs["block_table"]
    own = torch.zeros(inputs["key_cache"].shape[:2], dtype=torch.bool, device=device)
    for row, seq_len in zip(table, inputs["seq_lens"].tolist(), strict=True):
        first = 0 if window is None else max(0, seq_len - window)
        for position in range(first, seq_len):
            own[row[position // 16], position % 16] = True
        row[: first // 16] = 0
    assert not own.all()
    for name in ("key_cache", "value_cache"):
        inputs[name][~own] = torch.nan
    output, expected = attend(inputs, cut), reference(**inputs)
    assert torch.equal(output, clean)
    assert_close(expected, clean)
    assert not output[1].any()
    assert not expected[1].any()


@pytest.mark.parametrize("cut", CUTS[:3], ids=str)
def test_a_row_does_not_depend_on_its_batch(cut: Cut, device: torch.device) -> None:
    """Bit for bit, alone and among others, in a table of another width."""
    inputs = make_inputs(torch.float32, device, seq_lens=[5, 150, 0, 64, 33], **SMALL)
    together = attend(inputs, cut)
    for row, seq_len in enumerate(inputs["seq_lens"].tolist()):
        alone = inputs | {name: inputs[name][row : row + 1] for name in ("query", "seq_lens")}
        alone["block_table"] = inputs["block_table"][row : row + 1, : max(1, -(-seq_len // 16))]
        assert torch.equal(attend(alone, cut), together[row : row + 1])


@pytest.mark.parametrize("cut", CUTS[:3], ids=str)
def test_writes_nothing_but_its_rows(cut: Cut, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads no share's part that no share has written: what is allocated is NaN."""
    inputs = make_inputs(torch.float32, device, num_heads=14, num_kv_heads=2, head_dim=80)
    bands = GuardBands()
    monkeypatch.setattr(torch, "empty", bands.empty)
    output = paged_decode_attention(**inputs, cut=cut)
    monkeypatch.undo()
    bands.assert_untouched()
    assert_close(output, reference(**inputs))


def test_takes_slices_any_cache_strides_and_an_output(device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device)
    merged = torch.full((len(inputs["query"]), 15, 64), torch.nan, device=device)
    merged[:, :9] = inputs["query"]
    both = torch.stack((inputs["key_cache"], inputs["value_cache"]), dim=1)
    table = torch.zeros(len(merged), 20, dtype=torch.int32, device=device)
    table[:, : inputs["block_table"].shape[1]] = inputs["block_table"]
    expected = reference(**inputs)
    inputs |= {
        "query": merged[:, :9],
        "key_cache": both[:, 0],
        "value_cache": both[:, 1],
        "block_table": table[:, : inputs["block_table"].shape[1]],
    }
    assert not any(inputs[name].is_contiguous() for name in ("query", "key_cache", "value_cache", "block_table"))
    wide = torch.full((len(merged) + 2, 9, 70), 77.0, device=device)
    output = wide[1:-1, :, 3:67]
    for cut in (CUTS[0], CUTS[2]):
        assert paged_decode_attention(**inputs, output=output, cut=cut) is output
        assert_close(output, expected)
        output.fill_(77.0)
        assert (wide == 77.0).all()


def test_of_no_requests(device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, seq_lens=[])
    assert paged_decode_attention(**inputs).shape == reference(**inputs).shape == (0, 9, 64)


def test_more_rows_than_there_are_counters(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a captured graph may use stay where they are."""
    monkeypatch.setattr(arrivals, "_COUNTERS", {})
    few = arrivals.arrival_counters(device, 10)
    many = arrivals.arrival_counters(device, len(few) + 1)
    assert len(many) > len(few)
    assert arrivals.arrival_counters(device, 10) is many
    assert any(few is counters for counters in arrivals._COUNTERS[device])


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("max_seq_len", [1, 64, 1000, 4096, 131_072])
def test_cuts_are_sound_and_few_rows_are_split(max_seq_len: int, head_dim: int) -> None:
    splits = []
    for num_rows in (1, 3, 8, 100, 2048, 10**6):
        cut = choose_cut(num_rows, max_seq_len, head_dim, CPU)
        assert all(size & (size - 1) == 0 and size >= 1 for size in (cut.num_splits, cut.block_n, cut.num_warps))
        assert cut.block_n >= 16
        assert cut.min_keys >= 1
        assert cut.num_splits <= max(1, max_seq_len // 16)
        splits.append(cut.num_splits)
    assert splits == sorted(splits, reverse=True)
    assert splits[-1] == 1
    assert splits[0] > 1 or max_seq_len < 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 9, 64).double()}, "query is float64; allowed are float32, bfloat16, float16"),
        ({"query": torch.zeros(2, 576)}, r"query has shape \[2, 576\]; expected \[any, any, any\]"),
        ({"query": torch.zeros(2, 64, 9).transpose(1, 2)}, "query has stride 9 in its last dimension; expected 1"),
        ({"query": torch.zeros(2, 10, 64)}, "query has 10 heads, which is no multiple of key_cache's 3"),
        ({"query": torch.zeros(2, 3 * 129, 64)}, "129 query heads share a KV head; at most 128"),
        ({"query": torch.zeros(2, 9, 80)}, r"key_cache has shape .*; expected \[any, any, any, 80\]"),
        ({"key_cache": torch.zeros(4, 16, 3, 64).half()}, "key_cache is float16; expected float32"),
        ({"value_cache": torch.zeros(4, 16, 9, 64)}, r"value_cache has shape .*; expected \[4, 16, 3, 64\]"),
        ({"block_table": torch.zeros(2, 2).long()}, "block_table is int64; expected int32"),
        ({"block_table": torch.zeros(3, 2).int()}, r"block_table has shape \[3, 2\]; expected \[2, any\]"),
        ({"seq_lens": torch.zeros(3).int()}, r"seq_lens has shape \[3\]; expected \[2\]"),
        ({"seq_lens": torch.zeros(2, device="meta").int()}, "seq_lens is on meta; expected cpu"),
        ({"window": 0}, "window is 0; allowed are 1 and more, or None"),
        ({"output": torch.zeros(2, 9, 63)}, r"output has shape \[2, 9, 63\]; expected \[2, 9, 64\]"),
        ({"output": torch.zeros(2, 9, 64).half()}, "output is float16; expected float32"),
        (
            {name: torch.zeros(3, 1, 3, 257) for name in ("key_cache", "value_cache")}
            | {"query": torch.zeros(2, 3, 257)},
            "query has a head_dim of 257; allowed are 1 to 256",
        ),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {
        "query": torch.zeros(2, 9, 64),
        "key_cache": torch.zeros(4, 16, 3, 64),
        "value_cache": torch.zeros(4, 16, 3, 64),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([4, 20], dtype=torch.int32),
        "scale": 0.125,
    }
    with pytest.raises(ValueError, match=message):
        paged_decode_attention(**(inputs | change))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_any_mix_of_lengths_at_full_size(heads: tuple[int, int], head_dim: int, device: torch.device) -> None:
    """By the cut that is chosen; again and again to the same bits, whichever share comes last."""
    sizes: dict[str, Any] = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    for seq_lens in ([1, 15, 16, 17, 127, 1000, 0, 4097], [3000], [700] * 130):
        inputs = make_inputs(torch.bfloat16, device, seq_lens=seq_lens, **sizes)
        output = attend(inputs)
        assert_close(output, reference(**inputs))
        for _ in range(20):
            assert torch.equal(paged_decode_attention(**inputs), output)


@pytest.mark.gpu
@pytest.mark.alone
def test_past_two_to_the_31_elements(device: torch.device) -> None:
    """The blocks of a small pool, moved to the end of one whose offsets no int32 holds."""
    small = make_inputs(torch.float16, device, seq_lens=[40, 700], num_heads=32, num_kv_heads=8, head_dim=128)
    used = len(small["key_cache"])
    num_blocks = 2**31 // (16 * 8 * 128) + 2 * used
    large = dict(small)
    for name in ("key_cache", "value_cache"):
        large[name] = torch.zeros(num_blocks, 16, 8, 128, dtype=torch.float16, device=device)
        large[name][-used:] = small[name]
    large["block_table"] = small["block_table"] + (num_blocks - used)
    assert int(large["block_table"].min()) * 16 * 8 * 128 >= 2**31
    for cut in (None, *CUTS):
        assert torch.equal(attend(large, cut), attend(small, cut))
