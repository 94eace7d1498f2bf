"""Gate and up products of few tokens with weights in 8 bits and NormalFloat4, and the activation in their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.check import check_op
from kernels.ops.byte_gated_linear import byte_gated_linear
from kernels.ops.nf4_gated_linear import nf4_gated_linear
from kernels.ops.projection import Tiles
from kernels.reference.token_codes import TokenCodes
from kernels.registry import REGISTRY
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands
from tests.kernels.stored_oracle import stored_product

E4M3 = torch.float8_e4m3fn
# 21 outputs are a multiple of no tile, and the last gates' tile reaches into the up rows.
SIZES: dict[str, Any] = {"intermediate": 21, "bias": True}
CUTS = [
    (1, None, 208),
    (5, None, 1040),
    (9, Tiles(8, 32, 128, 1, 1), 48),
    (16, Tiles(16, 16, 128, 4, 1), 1024),
    (3, Tiles(1, 16, 128, 2, 1), 512),
]


def assert_right(y: Any, name: str, inputs: dict[str, Any]) -> None:
    gate, up = stored_product(inputs).chunk(2, dim=1)
    tolerance = REGISTRY[name].tolerances[y.dtype]
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(y.double().cpu(), expected, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("to", [E4M3, torch.int8], ids=str)
@pytest.mark.parametrize(("num_tokens", "tiles", "num_columns"), CUTS, ids=str)
def test_every_cut_of_bytes(
    num_tokens: int, tiles: Tiles | None, num_columns: int, to: torch.dtype, device: torch.device
) -> None:
    op = REGISTRY["byte_gated_linear"]
    sizes = SIZES | {"num_tokens": num_tokens, "num_columns": num_columns, "to": to}
    inputs = op.make_inputs(torch.float32, device, **sizes)
    assert_right(byte_gated_linear(**inputs, tiles=tiles), op.name, inputs)
    assert_right(op.reference(**inputs), op.name, inputs)


@pytest.mark.parametrize(
    ("num_tokens", "tiles", "num_columns", "block_size"),
    [(1, None, 192, 64), (5, None, 96, 96), (*CUTS[2][:2], 256, 32), (*CUTS[3], 64), (*CUTS[4], 128)],
    ids=str,
)
def test_every_cut_of_normal_floats(
    num_tokens: int, tiles: Tiles | None, num_columns: int, block_size: int, device: torch.device
) -> None:
    op = REGISTRY["nf4_gated_linear"]
    sizes = SIZES | {"num_tokens": num_tokens, "num_columns": num_columns, "block_size": block_size}
    inputs = op.make_inputs(torch.float32, device, **sizes)
    assert_right(nf4_gated_linear(**inputs, tiles=tiles), op.name, inputs)
    assert_right(op.reference(**inputs), op.name, inputs)


names = pytest.mark.parametrize("name", ["byte_gated_linear", "nf4_gated_linear"])


@names
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_over_poisoned_memory(name: str, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    check = check_op(REGISTRY[name], dtype, device, sizes=SIZES | {"num_tokens": num_tokens})
    assert check.passed, check.problem


@names
def test_writes_nothing_but_its_output(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = REGISTRY[name].make_inputs(torch.float32, device, **SIZES | {"bias": False})
    launch: Callable[..., Any] = REGISTRY[name].launch
    bands = GuardBands(value=77.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    y = launch(**inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert_right(y, name, inputs)


@names
def test_of_no_tokens(name: str, device: torch.device) -> None:
    inputs = REGISTRY[name].make_inputs(torch.float32, device, **SIZES | {"num_tokens": 0})
    for call in (REGISTRY[name].launch, REGISTRY[name].reference):
        y: Any = call(**inputs)
        assert y.shape == (0, 21)


@pytest.mark.parametrize(
    ("name", "sizes", "change", "message"),
    [
        ("byte_gated_linear", {"num_tokens": 17}, {}, "x has 17 tokens; at most 16 are allowed"),
        ("byte_gated_linear", {"num_columns": 71}, {}, "rows that are not of whole 16 bytes"),
        ("byte_gated_linear", {}, {"bias": torch.zeros(21)}, r"bias has shape \[21\]; expected \[42\]"),
        ("byte_gated_linear", {}, {"codes": torch.zeros(42, 208).char()}, "codes is int8; expected float8_e4m3fn"),
        (
            "byte_gated_linear",
            {},
            {"codes": torch.zeros(3, 208).to(E4M3), "scales": torch.ones(3, 1), "bias": None},
            "codes have 3 rows; gate and up together have an even number",
        ),
        ("nf4_gated_linear", {"num_tokens": 17}, {}, "x has 17 tokens; at most 16 are allowed"),
        ("nf4_gated_linear", {}, {"x": torch.zeros(2, 64)}, "no multiples of 32"),
        ("nf4_gated_linear", {}, {"bias": torch.zeros(21)}, r"bias has shape \[21\]; expected \[42\]"),
    ],
)
def test_launchers_name_what_is_wrong(name: str, sizes: dict[str, Any], change: dict[str, Any], message: str) -> None:
    inputs = REGISTRY[name].make_inputs(torch.float32, torch.device("cpu"), **SIZES | sizes)
    with pytest.raises(ValueError, match=message):
        REGISTRY[name].launch(**(inputs | change))


def test_tokens_have_to_be_codes_of_the_weights_kind() -> None:
    x = TokenCodes(torch.zeros(1, 32).char(), torch.ones(1, 1), torch.float32)
    with pytest.raises(ValueError, match="codes is float8_e4m3fn; expected int8"):
        byte_gated_linear(x, torch.zeros(4, 32).to(E4M3), torch.ones(4, 1))
