"""How a launch of the paged attention kernel is cut into tiles of rows and of keys."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import kernels.ops.paged_attention as module
from kernels.ops.attention_tiles import tile_sizes
from kernels.ops.paged_attention import paged_attention
from kernels.reference.paged_attention import paged_attention as reference
from kernels.specs.paged_attention import make_inputs
from tests.kernels.oracle import start_loc
from tests.kernels.paged_attention_agreement import assert_agrees


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


def test_decodes_take_the_small_tile(device: torch.device) -> None:
    assert tile_sizes(8, 8, 3, 64, 4).block_m == 16  # the least that a matrix unit takes
    inputs = make_inputs(torch.float32, device, query_lens=[1] * 8, seq_lens=range(1, 81, 10))
    assert_agrees(inputs)


@pytest.mark.parametrize("window", [None, 3, 40])
def test_a_chunk_of_several_tiles(window: int | None, device: torch.device) -> None:
    tiles = tile_sizes(150, 2, 3, 16, 4)
    assert 2 * tiles.block_q < 149
    assert tiles.block_q * 3 < tiles.block_m, "an idle row was meant to be among them"
    inputs = make_inputs(
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
    attend = module.attend_keys

    def recording(*arguments: Any) -> Any:
        calls.append((arguments[-1], *(int(value.handle.data.item()) for value in arguments[5:7])))
        return attend(*arguments)

    monkeypatch.setattr(module, "attend_keys", recording)
    tiles = tile_sizes(40, 1, 2, 32, 4)._replace(block_m=16, block_q=8, block_n=16)
    inputs = make_inputs(
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
    inputs = make_inputs(
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
    inputs = make_inputs(
        torch.float32, device, query_lens=[70], seq_lens=[90], num_heads=1, num_kv_heads=1, head_dim=64, window=3
    )
    assert_agrees(inputs, tiles=tiles)


def test_with_one_tile_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    """Bit for bit: alone, among others, and as the last row of a chunk."""
    sizes: dict[str, Any] = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 32}
    tiles = tile_sizes(2, 2, 3, 32, 4)
    inputs = make_inputs(torch.float32, device, query_lens=[7, 1], seq_lens=[90, 140], **sizes)
    together = paged_attention(**inputs, tiles=tiles)
    for first, rows, request in ((0, 7, 0), (6, 1, 0), (7, 1, 1)):
        alone = inputs | {
            "query": inputs["query"][first : first + rows],
            "query_start_loc": start_loc([rows], device),
            "block_table": inputs["block_table"][request : request + 1],
            "seq_lens": inputs["seq_lens"][request : request + 1],
        }
        assert torch.equal(paged_attention(**alone, tiles=tiles), together[first : first + rows])
