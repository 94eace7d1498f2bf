"""Linear ops whose weights go through the copy engine: the same results, and the path is taken where it should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops import projection
from kernels.ops.projection import Tiles, product_launch
from kernels.registry import REGISTRY
from tests.kernels.linear_oracle import widened

# Several boxes of rows, the last one partly outside; columns that end within a box; heads of another size than a box.
SMALL: dict[str, tuple[Tiles, dict[str, Any]]] = {
    "norm_linear": (Tiles(16, 64, 64, 4, 2), {"num_columns": 200, "num_rows": 136}),
    "norm_gated_linear": (Tiles(16, 128, 64, 4, 2), {"num_columns": 200, "intermediate": 72}),
    "norm_qkv_rotary_store": (Tiles(16, 128, 64, 4, 2), {"num_columns": 200, "head_dim": 80}),
}
LARGE: dict[str, list[tuple[Tiles, dict[str, Any]]]] = {
    "norm_linear": [
        (Tiles(16, 64, 128, 4, 5), {"num_columns": 4096, "num_rows": 4096}),
        (Tiles(64, 128, 64, 8, 5), {"num_columns": 4104, "num_rows": 4100}),
    ],
    "norm_gated_linear": [
        (Tiles(16, 128, 128, 4, 4), {"num_columns": 4096, "intermediate": 14336}),
        (Tiles(64, 128, 64, 8, 5), {"num_columns": 4104, "intermediate": 2050}),
    ],
    "norm_qkv_rotary_store": [
        (Tiles(16, 128, 128, 4, 4), {"num_columns": 4096, "head_dim": 128, "num_heads": 32, "num_kv_heads": 8}),
        (Tiles(32, 128, 64, 4, 5), {"num_columns": 4104, "head_dim": 96, "num_heads": 9, "num_kv_heads": 3}),
    ],
}


def box_rows(op: str, tiles: Tiles) -> int:
    return tiles.block_n if op == "norm_linear" else tiles.block_n // 2


def takes_it(op: str, tiles: Tiles, inputs: dict[str, Any]) -> bool:
    launch = product_launch(inputs["x"], inputs["weight"], inputs["square_sums"], tiles, box_rows=box_rows(op, tiles))
    assert launch.options["TMA"] == (launch.weight is not inputs["weight"])
    return launch.options["TMA"]


def cloned(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def assert_agrees(op_name: str, tiles: Tiles, inputs: dict[str, Any]) -> None:
    op = REGISTRY[op_name]
    referred = cloned(inputs)
    ours, expected = op.launch(**inputs, tiles=tiles), op.reference(**referred)
    bounds = op.tolerances[inputs["x"].dtype]
    torch.testing.assert_close(op.comparable(ours), op.comparable(expected), atol=bounds.atol, rtol=bounds.rtol)
    for name in op.mutates:
        torch.testing.assert_close(inputs[name], referred[name], atol=bounds.atol, rtol=bounds.rtol)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 21])
@pytest.mark.parametrize("op", SMALL)
def test_agrees_with_the_reference(op: str, num_tokens: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the interpreter, on a card that has one."""
    monkeypatch.setattr(projection, "supports_tma", lambda device: True)
    monkeypatch.setattr(projection, "SMALL_WEIGHT_BYTES", 0)
    tiles, sizes = SMALL[op]
    inputs = REGISTRY[op].make_inputs(
        torch.float16, torch.device("cpu"), num_tokens=num_tokens, num_parts=0, bias=bias, **sizes
    )
    assert takes_it(op, tiles, inputs)
    assert_agrees(op, tiles, inputs)


def test_only_what_it_can_take_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-byte rows of large 2-byte weights, against a matrix unit's least of tokens, without a norm to end."""
    op, tiles = "norm_linear", Tiles(16, 64, 64, 4, 2)
    device = torch.device("cpu")

    def inputs(dtype: torch.dtype = torch.bfloat16, num_columns: int = 64, num_parts: int = 0) -> dict[str, Any]:
        return REGISTRY[op].make_inputs(dtype, device, num_columns=num_columns, num_rows=128, num_parts=num_parts)

    assert not takes_it(op, tiles, inputs())  # a CPU
    monkeypatch.setattr(projection, "supports_tma", lambda device: True)
    assert not takes_it(op, tiles, inputs())  # small
    monkeypatch.setattr(projection, "SMALL_WEIGHT_BYTES", 0)
    assert takes_it(op, tiles, inputs())
    assert not takes_it(op, tiles, inputs(dtype=torch.float32))
    assert not takes_it(op, tiles, inputs(num_columns=77))
    assert not takes_it(op, tiles, inputs(num_parts=2))
    assert not takes_it(op, Tiles(1, 64, 64, 4, 2), inputs())
    assert not takes_it(op, Tiles(16, 32, 64, 4, 2), inputs())
    for name in ("x", "weight"):
        wide = inputs()
        assert not takes_it(op, tiles, wide | {name: widened(wide[name])})


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [3, 16, 70])
@pytest.mark.parametrize(("op", "which"), [(op, which) for op, cases in LARGE.items() for which in range(len(cases))])
def test_at_full_size(op: str, which: int, num_tokens: int) -> None:
    tiles, sizes = LARGE[op][which]
    inputs = REGISTRY[op].make_inputs(
        torch.bfloat16, torch.device("cuda"), num_tokens=num_tokens, num_parts=0, bias=False, **sizes
    )
    assert takes_it(op, tiles, inputs)
    assert_agrees(op, tiles, inputs)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others() -> None:
    tiles, sizes = LARGE["norm_linear"][0]
    inputs = REGISTRY["norm_linear"].make_inputs(
        torch.bfloat16, torch.device("cuda"), num_tokens=40, num_parts=0, bias=False, next_norm=False, **sizes
    )
    together, _ = REGISTRY["norm_linear"].launch(**inputs, tiles=tiles)
    for row in (0, 17, 39):
        alone = inputs | {name: inputs[name][row : row + 1] for name in ("x", "residual")}
        assert torch.equal(REGISTRY["norm_linear"].launch(**alone, tiles=tiles)[0][0], together[row])
