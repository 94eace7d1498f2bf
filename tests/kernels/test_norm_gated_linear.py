from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check import check_op
from kernels.ops.code_launch import few_tokens_options
from kernels.ops.norm_gated_linear import norm_gated_linear
from kernels.ops.projection import Tiles
from kernels.registry import REGISTRY
from tests.kernels.code_oracle import STORED, as_matrix
from tests.kernels.linear_oracle import EVERY_CUT, SEVERAL_TOKENS, TILES, guarded, naive_project, widened
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands

OP = REGISTRY["norm_gated_linear"]
# Neither columns nor outputs are a multiple of any tile, but for the one that is both.
SIZES = [{"num_columns": 77, "intermediate": 21}, {"num_columns": 64, "intermediate": 16}]


def make_inputs(dtype: torch.dtype, device: torch.device, **sizes: Any) -> dict[str, Any]:
    return OP.make_inputs(dtype, device, **(SIZES[0] | sizes))


def assert_right(y: Any, inputs: dict[str, Any]) -> None:
    gate, up = naive_project(inputs).chunk(2, dim=1)
    expected = (gate / (1 + (-gate).exp()) * up).to(inputs["x"].dtype)
    tolerance = OP.tolerances[expected.dtype]
    torch.testing.assert_close(y, expected, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "tiles", "num_tokens"), EVERY_CUT, ids=str)
def test_everything_at_once(
    dtype: torch.dtype, tiles: Tiles, num_tokens: int, sizes: dict[str, int], device: torch.device
) -> None:
    inputs, bands = guarded(make_inputs(dtype, device, num_tokens=num_tokens, **sizes))
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    y = norm_gated_linear(**inputs, tiles=tiles)
    assert y.is_contiguous()
    assert_right(y, inputs)
    bands.assert_untouched()
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


@pytest.mark.parametrize("num_parts", [0, 1, 5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tiles", TILES[:2], ids=str)
def test_every_part_by_itself(tiles: Tiles, bias: bool, num_parts: int, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, bias=bias, num_parts=num_parts)
    inputs["eps"] = 2.5  # beside a mean square of about 9: not to be left out
    assert_right(norm_gated_linear(**inputs, tiles=tiles), inputs)
    assert_right(OP.reference(**inputs), inputs)
    assert_right(norm_gated_linear(**inputs), inputs)


def test_is_rounded_once(device: torch.device) -> None:
    """An activation of float16's least, 6e-8, would be 0 or twice as large if it were rounded before the product."""
    inputs = {
        "x": torch.ones(1, 16, device=device).half(),
        "weight": torch.zeros(2, 16, device=device).half(),
        "square_sums": None,
        "eps": 0.0,
        "bias": torch.tensor([2.0**-23, 1000.0], device=device).half(),
    }
    for call in (norm_gated_linear, OP.reference):
        assert_right(call(**inputs), inputs)
    assert naive_project(inputs)[0, 0] == 2.0**-23


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("which", ["launch", "reference"])
def test_gates_far_from_zero_are_finite(which: str, device: torch.device) -> None:
    """Where the exponential overflows, the activation is 0, and where it vanishes, the gate itself."""
    gates = torch.tensor([-1e4, -100.0, 100.0, 1e4], device=device)
    x = torch.ones(1, 1, device=device)
    weight = torch.cat((gates, torch.full((4,), 2.0, device=device)))[:, None].contiguous()
    y: Any = getattr(OP, which)(x, weight)
    assert y.tolist() == [[0.0, 0.0, 200.0, 2e4]]


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_takes_rows_of_wider_tensors(tiles: Tiles, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device)
    strided = inputs | {name: widened(inputs[name]) for name in ("x", "weight", "square_sums")}
    assert_right(norm_gated_linear(**strided, tiles=tiles), inputs)


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_writes_nothing_but_its_output(tiles: Tiles, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(torch.float32, device)
    bands = GuardBands(value=77.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    y = norm_gated_linear(**inputs, tiles=tiles)
    monkeypatch.undo()
    bands.assert_untouched()
    assert_right(y, inputs)


@pytest.mark.parametrize(("tiles", "num_tokens"), SEVERAL_TOKENS, ids=str)
def test_a_token_does_not_depend_on_its_batch(tiles: Tiles, num_tokens: int, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device, num_tokens=num_tokens)
    y = norm_gated_linear(**inputs, tiles=tiles)
    for begin, end in ((0, 1), (num_tokens - 1, num_tokens), (num_tokens // 3, num_tokens - 1)):
        part = {name: value[begin:end] if name in ("x", "square_sums") else value for name, value in inputs.items()}
        assert torch.equal(norm_gated_linear(**part, tiles=tiles), y[begin:end])


@pytest.mark.parametrize("call", [norm_gated_linear, OP.reference], ids=["launch", "reference"])
def test_of_no_tokens(call: Callable[..., Tensor], device: torch.device) -> None:
    assert call(**make_inputs(torch.float32, device, num_tokens=0)).shape == (0, 21)


@pytest.mark.parametrize(("num_tokens", "bits", "num_columns", "group_size", "origin"), STORED, ids=str)
def test_every_way_of_storing_codes(
    num_tokens: int, bits: int, num_columns: int, group_size: int, origin: str, device: torch.device
) -> None:
    """21 gate rows and as many up rows: neither are a multiple of a tile, and the last gates' tile reaches into the others."""
    codes = {"bits": bits, "num_columns": num_columns, "group_size": group_size, "origin": origin}
    inputs = make_inputs(torch.float32, device, num_tokens=num_tokens, num_parts=0, **codes)
    expected = as_matrix(inputs)
    assert_right(norm_gated_linear(**inputs), expected)
    assert_right(OP.reference(**inputs), expected)


@pytest.mark.parametrize(
    ("tiles", "num_columns"),
    [(Tiles(1, 16, 128, 2, 1), 512), (Tiles(8, 32, 128, 1, 1), 256), (Tiles(16, 16, 128, 4, 1), 1024)],
    ids=str,
)
def test_codes_in_full_shares(tiles: Tiles, num_columns: int, device: torch.device) -> None:
    """Three tokens, in as many programs where a program takes one. Loads have no masks."""
    codes = {"bits": 4, "num_columns": num_columns, "group_size": 128, "origin": "float"}
    inputs = make_inputs(torch.float32, device, num_tokens=3, intermediate=16, num_parts=0, bias=False, **codes)
    assert few_tokens_options(num_columns, tiles, 4, "none")["EVEN"]
    assert_right(norm_gated_linear(**inputs, tiles=tiles), as_matrix(inputs))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES[1:])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_codes_over_poisoned_memory(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Every output is written, the reference's, and nothing is left of what was there."""
    codes = {"bits": 4, "num_columns": 160, "group_size": 32, "origin": "integer"}
    sizes = {"num_tokens": num_tokens, "intermediate": 21, "num_parts": 0}
    check = check_op(OP, dtype, device, sizes=sizes | codes)
    assert check.passed, check.problem


@pytest.mark.parametrize(
    ("sizes", "change", "message"),
    [
        ({"num_tokens": 17}, {}, "x has 17 tokens; with a code_grid at most 16 are allowed"),
        ({}, {"square_sums": torch.ones(5, 1)}, "square_sums are given with a code_grid; expected None"),
        ({}, {"tiles": Tiles(32, 16, 128, 1, 1)}, "block_m is 1, 8 or 16 and block_n a multiple of 16"),
        ({}, {"tiles": Tiles(1, 8, 128, 1, 1)}, "block_m is 1, 8 or 16 and block_n a multiple of 16"),
        ({}, {"weight": torch.zeros(42, 32)}, "weight is float32; expected int32"),
        ({}, {"weight": torch.zeros(42, 16).int()}, r"weight has shape \[42, 16\]; expected \[42, 32\]"),
        ({}, {"bias": torch.zeros(21)}, r"bias has shape \[21\]; expected \[42\]"),
    ],
)
def test_launcher_names_what_is_wrong_with_codes(sizes: dict[str, Any], change: dict[str, Any], message: str) -> None:
    codes = {"bits": 4, "num_columns": 192, "group_size": 64, "num_parts": 0}
    inputs = make_inputs(torch.float32, torch.device("cpu"), **codes | sizes)
    with pytest.raises(ValueError, match=message):
        norm_gated_linear(**(inputs | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8).long()}, "x is int64; allowed are float32"),
        ({"x": torch.zeros(8, 2).t()}, "x has stride 2 in its last dimension; expected 1"),
        ({"weight": torch.zeros(6, 7)}, r"weight has shape \[6, 7\]; expected \[any, 8\]"),
        ({"weight": torch.zeros(7, 8)}, "weight has 7 rows; gate and up together have an even number"),
        ({"weight": torch.zeros(6, 8).half()}, "weight is float16; expected float32"),
        ({"square_sums": torch.zeros(2)}, r"square_sums has shape \[2\]; expected \[2, any\]"),
        ({"bias": torch.zeros(3)}, r"bias has shape \[3\]; expected \[6\]"),
        ({"bias": torch.zeros(6, device="meta")}, "bias is on meta; expected cpu"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {"x": torch.zeros(2, 8), "weight": torch.zeros(6, 8)}
    with pytest.raises(ValueError, match=message):
        norm_gated_linear(**(inputs | change))


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_weight_past_two_to_the_31_elements(num_tokens: int, device: torch.device) -> None:
    """The up projection of the last outputs lies beyond."""
    num_columns = 4096
    intermediate = 2**30 // num_columns + 8
    small = make_inputs(
        torch.float16,
        device,
        num_tokens=num_tokens,
        num_columns=num_columns,
        intermediate=4,
        num_parts=0,
        bias=False,
    )
    weight = torch.zeros(2, intermediate, num_columns, dtype=torch.float16, device=device)
    weight[:, -4:] = small["weight"].view(2, 4, num_columns)
    y = norm_gated_linear(small["x"], weight.view(-1, num_columns))
    assert_right(y[:, -4:], small)
    assert not y[:, :-4].any()
