"""Products of few tokens in fragments: the path is taken where it is asked for, and every cut of the columns is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.ops import projection
from kernels.ops.fragment_projection import fragment_options
from kernels.ops.norm_linear import norm_linear
from kernels.ops.projection import Tiles, default_tiles, product_launch
from kernels.registry import REGISTRY
from tests.kernels.linear_oracle import guarded, naive_project
from tests.kernels.oracle import in_turn

OP = REGISTRY["norm_linear"]
PLAIN: dict[str, Any] = {"num_parts": 0, "bias": False, "residual": False, "next_norm": False}
# Columns, shares, columns of a share that are loaded at once; whether that is all of it, and whether nothing has a mask.
CUTS = [
    (576, 4, 160, True, False),  # 4, 5, 4 and 5 steps of 32
    (576, 2, 288, True, True),
    (1536, 8, 256, True, True),  # fewer than are allowed
    (512, 2, 64, False, True),  # a loop, of whole rounds
    (576, 1, 96, False, True),
    (576, 4, 64, False, False),
    (200, 2, 64, False, False),  # the last step is filled in part
    (33, 8, 32, True, False),  # most shares are empty
    (31, 1, 32, True, False),
]
TILES = Tiles(8, 16, 32, 2, 1, fragments=True)


def launch_options(tiles: Tiles, **sizes: Any) -> dict[str, Any]:
    inputs = OP.make_inputs(torch.bfloat16, torch.device("cpu"), num_columns=64, num_rows=128, num_parts=0, **sizes)
    return product_launch(inputs["x"], inputs["weight"], None, tiles, box_rows=tiles.block_n).options


@pytest.mark.parametrize(("num_columns", "shares", "block_k", "once", "even"), CUTS)
def test_how_columns_are_cut(num_columns: int, shares: int, block_k: int, once: bool, even: bool) -> None:
    options = fragment_options(num_columns, shares, block_k)
    assert (options["FRAGMENTS"], options["FRAGMENTS_ONCE"], options["EVEN_K"]) == (shares, once, even)
    assert options["BLOCK_K"] <= block_k
    assert not once or options["BLOCK_K"] * shares >= num_columns


@pytest.mark.parametrize("block_m", [8, 16])
@pytest.mark.parametrize(
    ("dtype", "num_columns", "shares", "block_k", "once", "even"),
    [*in_turn(CUTS), *((torch.float16 if i % 2 == 0 else torch.float32, *cut) for i, cut in enumerate(CUTS))],
)
def test_every_cut_of_the_columns(
    dtype: torch.dtype,
    num_columns: int,
    shares: int,
    block_k: int,
    once: bool,
    even: bool,
    block_m: int,
    device: torch.device,
) -> None:
    """Each column is multiplied once: x is of one sign, as is the weight, so that no two errors cancel."""
    inputs = OP.make_inputs(dtype, device, num_tokens=block_m - 1, num_columns=num_columns, num_rows=21, **PLAIN)
    inputs |= {name: inputs[name].abs() for name in ("x", "weight")}
    inputs, bands = guarded(inputs)
    y, _ = norm_linear(**inputs, tiles=Tiles(block_m, 16, block_k, shares, 1, fragments=True))
    bounds = OP.tolerances[dtype]
    torch.testing.assert_close(y, naive_project(inputs).to(dtype), atol=bounds.atol, rtol=bounds.rtol)
    bands.assert_untouched()


@pytest.mark.parametrize("num_parts", [1, 5])
def test_ends_the_norm_before(num_parts: int, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_columns=77, num_rows=21, **PLAIN | {"num_parts": num_parts})
    inputs["eps"] = 2.5  # beside a mean square of about 9: not to be left out
    y, _ = norm_linear(**inputs, tiles=TILES)
    bounds = OP.tolerances[torch.float32]
    torch.testing.assert_close(y, naive_project(inputs).float(), atol=bounds.atol, rtol=bounds.rtol)


def test_is_taken_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_options(TILES)["FRAGMENTS"] == 2
    assert launch_options(TILES._replace(fragments=False, block_m=16))["FRAGMENTS"] == 0
    monkeypatch.setattr(projection, "supports_tma", lambda device: True)
    monkeypatch.setattr(projection, "SMALL_WEIGHT_BYTES", 0)
    wide = Tiles(16, 64, 64, 4, 2)
    assert launch_options(wide)["TMA"]
    assert not launch_options(wide._replace(fragments=True))["TMA"]


def test_what_is_loaded_at_once_is_not_fetched_ahead() -> None:
    assert not launch_options(TILES)["SMALL"]
    assert launch_options(TILES._replace(num_warps=1))["SMALL"]


def test_no_size_takes_it_by_default() -> None:
    assert not any(default_tiles(num_tokens, 576, 576).fragments for num_tokens in range(1, 65))


@pytest.mark.parametrize("change", [{"block_m": 1}, {"block_m": 32}, {"block_n": 8}, {"block_k": 16}, {"block_k": 48}])
def test_tiles_that_are_none_for_fragments(change: dict[str, int]) -> None:
    with pytest.raises(
        ValueError, match="with fragments block_m is 8 or 16, block_n a multiple of 16 and block_k of 32"
    ):
        launch_options(TILES._replace(**change))
