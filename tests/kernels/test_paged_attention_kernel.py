from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

import kernels.ops.paged_attention as module
from kernels.ops.paged_attention import TileSizes, paged_attention, tile_sizes
from kernels.reference.paged_attention import paged_attention as reference
from kernels.registry import REGISTRY
from kernels.specs.paged_attention import make_inputs as make_paged_attention_inputs
from tests.kernels.oracle import HEAD_DIMS, HEADS, KERNEL_DTYPES, GuardBands, chunked, start_loc


def assert_agrees(inputs: dict[str, Any], tiles: TileSizes | None = None) -> Tensor:
    output = paged_attention(**inputs, tiles=tiles)
    tolerance = REGISTRY["paged_attention"].tolerances[output.dtype]
    torch.testing.assert_close(output, reference(**inputs), atol=tolerance.atol, rtol=tolerance.rtol)
    return output


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads"),
    [(64, 9, 3), (80, 14, 2), (96, 1, 1), (128, 32, 8), (64, 24, 1), (16, 33, 1), (7, 2, 1)],
)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_any_mix_of_lengths(
    dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    inputs = make_paged_attention_inputs(
        dtype,
        device,
        query_lens=[1, 5, 0, 1, 7],
        seq_lens=[17, 16, 0, 1, 70],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    bands = GuardBands()
    for name in ("query", "key_cache", "value_cache"):
        inputs[name] = bands.wrap(inputs[name])
    assert_agrees(inputs)
    bands.assert_untouched()


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
    inputs = make_paged_attention_inputs(
        dtype,
        device,
        query_lens=[1] * 6 + lengths + [5, 5, 300],
        seq_lens=lengths * 2 + [127, 1000, 1000],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
    )
    bands = GuardBands()
    for name in ("query", "key_cache", "value_cache"):
        inputs[name] = bands.wrap(inputs[name])
    assert_agrees(inputs)
    bands.assert_untouched()
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
    inputs = make_paged_attention_inputs(
        torch.float32,
        device,
        query_lens=[1, 5, 1],
        seq_lens=[33, 9, 70],
        num_heads=3,
        num_kv_heads=1,
        head_dim=32,
        block_size=block_size,
        window=window,
    )
    assert tile_sizes(7, 3, 3, 32, 4).block_n < 70  # so that a request takes more than one iteration
    assert_agrees(inputs)


@pytest.mark.parametrize("window", [None, 3, 40])
def test_a_chunk_of_several_tiles(window: int | None, device: torch.device) -> None:
    tiles = tile_sizes(150, 2, 3, 16, 4)
    assert 2 * tiles.block_q < 149
    assert tiles.block_q * 3 < tiles.block_m, "an idle row was meant to be among them"
    inputs = make_paged_attention_inputs(
        torch.float32,
        device,
        query_lens=[149, 1],
        seq_lens=[160, 30],
        num_heads=3,
        num_kv_heads=1,
        head_dim=16,
        window=window,
    )
    assert_agrees(inputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the interpreter")
@pytest.mark.parametrize("window", [None, 50])
def test_keys_that_all_rows_see_need_no_mask(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways through the keys are taken, and together they cover each key that a tile of rows may see, once."""
    calls: list[tuple[bool, int, int]] = []
    attend = module._attend_keys

    def recording(*arguments: Any) -> Any:
        calls.append((arguments[-1], *(int(value.handle.data.item()) for value in arguments[5:7])))
        return attend(*arguments)

    monkeypatch.setattr(module, "_attend_keys", recording)
    tiles = tile_sizes(40, 1, 2, 32, 4)._replace(block_m=16, block_q=8, block_n=16)
    inputs = make_paged_attention_inputs(
        torch.float32, device, query_lens=[20], seq_lens=[71], num_heads=2, num_kv_heads=1, head_dim=32, window=window
    )
    assert_agrees(inputs, tiles=tiles)
    unmasked, masked = (sorted(call[1:] for call in calls if call[0] == kind) for kind in (False, True))
    if window is None:  # tiles of rows begin at positions 51, 59 and 67
        assert (unmasked, masked) == ([(0, 48), (0, 48), (0, 64)], [(48, 59), (48, 67), (64, 71)])
    else:
        assert unmasked == [(begin, begin) for begin in (2, 10, 18)]
        assert masked == [(2, 59), (10, 67), (18, 71)]


def test_a_tile_writes_its_own_tokens_only(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its idle row would belong to the next tile, whose own write may come first on a GPU."""
    inputs = make_paged_attention_inputs(
        torch.float32, device, query_lens=[30], seq_lens=[30], num_heads=3, num_kv_heads=1, head_dim=16
    )
    block_q = tile_sizes(30, 1, 3, 16, 4).block_q
    assert block_q < 30
    kernel = module._paged_attention_kernel
    first_tile = MagicMock()
    first_tile.__getitem__.side_effect = lambda grid: kernel[(1, grid[1])]
    monkeypatch.setattr(module, "_paged_attention_kernel", first_tile)
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, 77.0, **options))
    output = paged_attention(**inputs)
    monkeypatch.undo()
    torch.testing.assert_close(output[:block_q], reference(**inputs)[:block_q])
    assert (output[block_q:] == 77.0).all()


# Idle rows see no key at all and divide zero by zero; they are not stored.
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
def test_rows_whose_window_begins_behind_the_first_keys(device: torch.device) -> None:
    tiles = tile_sizes(70, 1, 1, 64, 4)._replace(block_m=64, block_q=64, block_n=16)
    inputs = make_paged_attention_inputs(
        torch.float32, device, query_lens=[70], seq_lens=[90], num_heads=1, num_kv_heads=1, head_dim=64, window=3
    )
    assert_agrees(inputs, tiles=tiles)


def test_decodes_take_the_small_tile(device: torch.device) -> None:
    assert tile_sizes(8, 8, 3, 64, 4).block_m == 16  # the least that a matrix unit takes
    inputs = make_paged_attention_inputs(torch.float32, device, query_lens=[1] * 8, seq_lens=range(1, 81, 10))
    assert_agrees(inputs)


@pytest.mark.parametrize("group", [1, 3, 7, 16, 33, 128])
@pytest.mark.parametrize("head_dim", [1, 64, 80, 256])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_tiles_fit_the_group_and_the_hardware(group: int, head_dim: int, element_bytes: int) -> None:
    for num_tokens in (1, 8, 1000, 4096):
        tiles = tile_sizes(num_tokens, 1, group, head_dim, element_bytes)
        assert tiles.block_q >= 1
        assert tiles.block_q * group <= tiles.block_m
        assert tiles.block_d >= head_dim
        assert all(size >= 16 and size & (size - 1) == 0 for size in tiles[1:4])
        assert tiles.num_warps in (1, 2, 4, 8, 16)
        assert tiles.num_stages >= 1


def test_with_one_tile_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    """Bit for bit: alone, among others, and as the last row of a chunk."""
    sizes: dict[str, Any] = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 32}
    tiles = tile_sizes(2, 2, 3, 32, 4)
    inputs = make_paged_attention_inputs(torch.float32, device, query_lens=[7, 1], seq_lens=[90, 140], **sizes)
    together = paged_attention(**inputs, tiles=tiles)
    for first, rows, request in ((0, 7, 0), (6, 1, 0), (7, 1, 1)):
        alone = inputs | {
            "query": inputs["query"][first : first + rows],
            "query_start_loc": start_loc([rows], device),
            "block_table": inputs["block_table"][request : request + 1],
            "seq_lens": inputs["seq_lens"][request : request + 1],
        }
        assert torch.equal(paged_attention(**alone, tiles=tiles), together[first : first + rows])


def test_writes_where_it_is_told(device: torch.device) -> None:
    inputs = make_paged_attention_inputs(torch.float32, device)
    wide = torch.full((len(inputs["query"]) + 2, 9, 70), 77.0, device=device)
    output = wide[1:-1, :, 3:67]
    assert paged_attention(**inputs, output=output) is output
    torch.testing.assert_close(output, reference(**inputs), atol=1e-5, rtol=1e-5)
    output.fill_(77.0)
    assert (wide == 77.0).all()


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([], []), ([0], [0]), ([0, 0], [5, 0]), ([1, 0], [5, 0]), ([0, 1, 0, 3], [7, 9, 0, 3]), ([1], [1])],
)
def test_empty_and_one_token_requests(query_lens: list[int], seq_lens: list[int], device: torch.device) -> None:
    inputs = make_paged_attention_inputs(torch.float32, device, query_lens=query_lens, seq_lens=seq_lens)
    output = assert_agrees(inputs)
    assert output.shape == (sum(query_lens), 9, 64)


def test_writes_nothing_but_its_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_paged_attention_inputs(torch.float32, device, num_heads=14, num_kv_heads=2, head_dim=80)
    bands = GuardBands(value=77.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    output = paged_attention(**inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    torch.testing.assert_close(output, reference(**inputs))


def test_takes_slices_and_any_cache_strides(device: torch.device) -> None:
    inputs = make_paged_attention_inputs(torch.float32, device)
    merged = torch.full((len(inputs["query"]), 15, 64), float("nan"), device=device)
    merged[:, :9] = inputs["query"]
    both = torch.stack((inputs["key_cache"], inputs["value_cache"]), dim=1)
    expected = reference(**inputs)
    inputs |= {"query": merged[:, :9], "key_cache": both[:, 0], "value_cache": both[:, 1]}
    assert not any(inputs[name].is_contiguous() for name in ("query", "key_cache", "value_cache"))
    torch.testing.assert_close(paged_attention(**inputs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 8])
def test_nan_in_foreign_slots_stays_there(window: int | None, device: torch.device) -> None:
    """Reused blocks hold what their last owner left; ids past a request's blocks or behind its window are not read."""
    inputs = make_paged_attention_inputs(
        torch.float32, device, query_lens=[1, 4, 17], seq_lens=[33, 20, 17], window=window
    )
    clean = paged_attention(**inputs)
    own = torch.zeros(inputs["key_cache"].shape[:2], dtype=torch.bool, device=device)
    lengths = zip((1, 4, 17), inputs["seq_lens"].tolist(), strict=True)
    for row, (query_len, seq_len) in zip(inputs["block_table"], lengths, strict=True):
        first = 0 if window is None else max(0, seq_len - query_len - window + 1)
        for position in range(first, seq_len):
            own[row[position // 16], position % 16] = True
        row[: first // 16] = 0
    assert not own.all()
    for name in ("key_cache", "value_cache"):
        inputs[name][~own] = float("nan")
    assert torch.equal(paged_attention(**inputs), clean)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("window", [8, 24])
def test_window_counts_the_token_itself(window: int, chunk: int, device: torch.device) -> None:
    """Equal scores and one-hot values show each position's weight; every way to cut a prompt is the same."""
    for length in (window - 1, window, window + 1, 3 * window + 5):
        inputs = make_paged_attention_inputs(
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
def test_past_two_to_the_31_elements() -> None:
    """The blocks of a small pool, moved to the end of one whose offsets no int32 holds."""
    small = make_paged_attention_inputs(
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
