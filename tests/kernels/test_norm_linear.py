from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops.norm_linear import norm_linear
from kernels.ops.projection import Tiles, default_tiles, is_small
from kernels.registry import REGISTRY
from tests.kernels.linear_oracle import EVERY_CUT, SEVERAL_TOKENS, TILES, guarded, naive_project, widened
from tests.kernels.oracle import KERNEL_DTYPES, GuardBands

OP = REGISTRY["norm_linear"]
# Neither columns nor rows are a multiple of any tile, but for the one that is both.
SIZES = [{"num_columns": 77, "num_rows": 35}, {"num_columns": 64, "num_rows": 32}]
PLAIN: dict[str, Any] = {"num_parts": 0, "bias": False, "residual": False, "next_norm": False}


def make_inputs(dtype: torch.dtype, device: torch.device, **sizes: Any) -> dict[str, Any]:
    return OP.make_inputs(dtype, device, **(SIZES[0] | sizes))


def assert_right(outputs: Any, inputs: dict[str, Any]) -> Tensor:
    """Against float64; what is made of the rounded output, against that output."""
    y, deferred = outputs
    expected = naive_project(inputs)
    if inputs["residual"] is not None:
        expected += inputs["residual"].double()
    dtype = inputs["out_dtype"] or inputs["x"].dtype
    tolerance = OP.tolerances[dtype]
    torch.testing.assert_close(y, expected.to(dtype), atol=tolerance.atol, rtol=tolerance.rtol)
    if inputs["next_norm_weight"] is None:
        assert deferred is None
        return y
    assert torch.equal(deferred.scaled, y * inputs["next_norm_weight"])
    assert (deferred.square_sums.dtype, deferred.square_sums.shape[0]) == (torch.float32, len(y))
    torch.testing.assert_close(deferred.square_sums.double().sum(1), y.double().square().sum(1), atol=1e-6, rtol=1e-5)
    return y


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "tiles", "num_tokens"), EVERY_CUT, ids=str)
def test_everything_at_once(
    dtype: torch.dtype, tiles: Tiles, num_tokens: int, sizes: dict[str, int], device: torch.device
) -> None:
    inputs, bands = guarded(make_inputs(dtype, device, num_tokens=num_tokens, **sizes))
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    y, deferred = norm_linear(**inputs, tiles=tiles)
    assert_right((y, deferred), inputs)
    assert deferred is not None
    assert deferred.square_sums.shape == (num_tokens, -(-sizes["num_rows"] // tiles.block_n))
    bands.assert_untouched()
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


@pytest.mark.parametrize("num_parts", [0, 5])
@pytest.mark.parametrize(("bias", "residual", "next_norm"), list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("tiles", TILES[:2], ids=str)
def test_every_part_by_itself(
    tiles: Tiles, bias: bool, residual: bool, next_norm: bool, num_parts: int, device: torch.device
) -> None:
    sizes: dict[str, Any] = {"num_columns": 40, "num_rows": 18}
    inputs = make_inputs(
        torch.float32, device, bias=bias, residual=residual, next_norm=next_norm, num_parts=num_parts, **sizes
    )
    inputs["eps"] = 2.5  # beside a mean square of about 9: not to be left out
    assert_right(norm_linear(**inputs, tiles=tiles), inputs)
    assert_right(OP.reference(**inputs), inputs)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_logits_are_float32_whatever_the_weights_are(dtype: torch.dtype, num_tokens: int, device: torch.device) -> None:
    """Not rounded on the way: float16 would lose what float32's tolerance asks for."""
    inputs = make_inputs(dtype, device, num_tokens=num_tokens, out_dtype=torch.float32, **PLAIN)
    logits = assert_right(norm_linear(**inputs), inputs)
    assert logits.dtype == torch.float32


def test_the_default_tiles_of_several_sizes(device: torch.device) -> None:
    for num_tokens in (1, 2, 33):
        assert default_tiles(num_tokens, 35, 77).block_m == (1 if num_tokens == 1 else 16 if num_tokens == 2 else 64)
        inputs = make_inputs(torch.float32, device, num_tokens=num_tokens)
        assert_right(norm_linear(**inputs), inputs)


@pytest.mark.parametrize(("tiles", "num_tokens"), SEVERAL_TOKENS, ids=str)
def test_the_output_may_be_the_residual(tiles: Tiles, num_tokens: int, device: torch.device) -> None:
    """Every program reads what it writes, and nobody else does."""
    inputs = make_inputs(torch.float32, device, num_tokens=num_tokens)
    expected, expected_deferred = norm_linear(**inputs, tiles=tiles)
    residual = inputs["residual"]
    y, deferred = norm_linear(**inputs, output=residual, tiles=tiles)
    assert y is residual
    assert torch.equal(y, expected)
    assert deferred is not None
    assert expected_deferred is not None
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(deferred, expected_deferred, strict=True))


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_takes_rows_of_wider_tensors(tiles: Tiles, device: torch.device) -> None:
    inputs = make_inputs(torch.float32, device)
    names = ("x", "weight", "square_sums", "residual")
    strided = inputs | {name: widened(inputs[name]) for name in names}
    assert not any(strided[name].is_contiguous() for name in names)
    wide = torch.full((5, 44), 77.0, device=device)
    output = wide[:, 3:38]
    y, _ = norm_linear(**strided, output=output, tiles=tiles)
    assert y is output
    assert_right((y, norm_linear(**strided, tiles=tiles)[1]), inputs)
    output.fill_(77.0)
    assert (wide == 77.0).all()


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_writes_nothing_but_its_outputs(tiles: Tiles, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(torch.float32, device)
    bands = GuardBands(value=77.0)
    monkeypatch.setattr(torch, "empty", bands.empty)
    outputs = norm_linear(**inputs, tiles=tiles)
    monkeypatch.undo()
    bands.assert_untouched()
    assert_right(outputs, inputs)


@pytest.mark.parametrize(("tiles", "num_tokens"), SEVERAL_TOKENS, ids=str)
def test_a_token_does_not_depend_on_its_batch(tiles: Tiles, num_tokens: int, device: torch.device) -> None:
    """Bit for bit, alone and at another place of the batch; what the others hold (NaN here) stays theirs."""
    inputs = make_inputs(torch.float32, device, num_tokens=num_tokens)
    y, deferred = norm_linear(**inputs, tiles=tiles)
    assert deferred is not None
    for begin, end in ((0, 1), (num_tokens - 1, num_tokens), (num_tokens // 3, num_tokens - 1)):
        part = {
            name: value[begin:end] if name in ("x", "square_sums", "residual") else value
            for name, value in inputs.items()
        }
        alone, alone_deferred = norm_linear(**part, tiles=tiles)
        assert torch.equal(alone, y[begin:end])
        assert alone_deferred is not None
        assert torch.equal(alone_deferred.square_sums, deferred.square_sums[begin:end])
    poisoned = inputs | {"x": inputs["x"].clone()}
    poisoned["x"][1] = torch.nan
    others = torch.arange(num_tokens, device=device) != 1
    again, _ = norm_linear(**poisoned, tiles=tiles)
    assert torch.equal(again[others], y[others])
    assert again[1].isnan().all()


@pytest.mark.parametrize("call", [norm_linear, OP.reference], ids=["launch", "reference"])
def test_of_no_tokens(call: Callable[..., Any], device: torch.device) -> None:
    y, deferred = call(**make_inputs(torch.float32, device, num_tokens=0))
    assert (y.shape, deferred.scaled.shape, deferred.square_sums.shape[0]) == ((0, 35), (0, 35), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8).long()}, "x is int64; allowed are float32"),
        ({"x": torch.zeros(2, 8, 1)}, r"x has shape \[2, 8, 1\]; expected \[any, any\]"),
        ({"x": torch.zeros(8, 2).t()}, "x has stride 2 in its last dimension; expected 1"),
        ({"weight": torch.zeros(6, 7)}, r"weight has shape \[6, 7\]; expected \[any, 8\]"),
        ({"weight": torch.zeros(6, 8).half()}, "weight is float16; expected float32"),
        ({"square_sums": torch.zeros(3, 4)}, r"square_sums has shape \[3, 4\]; expected \[2, any\]"),
        ({"square_sums": torch.zeros(2, 4).half()}, "square_sums is float16; expected float32"),
        ({"bias": torch.zeros(8)}, r"bias has shape \[8\]; expected \[6\]"),
        ({"residual": torch.zeros(2, 8)}, r"residual has shape \[2, 8\]; expected \[2, 6\]"),
        ({"residual": torch.zeros(2, 6, device="meta")}, "residual is on meta; expected cpu"),
        ({"next_norm_weight": torch.zeros(8)}, r"next_norm_weight has shape \[8\]; expected \[6\]"),
        ({"next_norm_weight": torch.zeros(6).half()}, "next_norm_weight is float16; expected float32"),
        ({"output": torch.zeros(2, 7)}, r"output has shape \[2, 7\]; expected \[2, 6\]"),
        ({"output": torch.zeros(2, 6).half()}, "output is float16; expected float32"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {"x": torch.zeros(2, 8), "weight": torch.zeros(6, 8)}
    with pytest.raises(ValueError, match=message):
        norm_linear(**(inputs | change))


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_weight_past_two_to_the_31_elements(num_tokens: int, device: torch.device) -> None:
    num_columns = 4096
    num_rows = 2**31 // num_columns + 16
    weight = torch.zeros(num_rows, num_columns, dtype=torch.float16, device=device)
    small = make_inputs(torch.float16, device, num_tokens=num_tokens, num_columns=num_columns, num_rows=8, **PLAIN)
    weight[-8:] = small["weight"]
    y, _ = norm_linear(small["x"], weight)
    assert_right((y[:, -8:], None), small)
    assert not y[:, :-8].any()


@pytest.mark.gpu
@pytest.mark.alone
def test_logits_past_two_to_the_31_elements(device: torch.device) -> None:
    vocab_size = 128_256
    num_tokens = 2**31 // vocab_size + 20
    x = torch.zeros(num_tokens, 16, dtype=torch.float16, device=device)
    small = make_inputs(
        torch.float16, device, num_tokens=5, num_columns=16, num_rows=vocab_size, out_dtype=torch.float32, **PLAIN
    )
    x[-5:] = small["x"]
    y, _ = norm_linear(x, small["weight"], out_dtype=torch.float32)
    assert_right((y[-5:], None), small)
    assert not y[: num_tokens - 5].any()


def test_a_norm_that_follows_needs_the_dtype_of_x() -> None:
    inputs = make_inputs(torch.float16, torch.device("cpu"), bias=False) | {"out_dtype": torch.float32}
    with pytest.raises(ValueError, match=r"out_dtype is torch.float32 with a norm that follows"):
        norm_linear(**inputs)


def test_only_rows_that_the_copy_engine_takes_are_fetched_ahead() -> None:
    assert is_small(torch.empty(64, 64, dtype=torch.bfloat16))
    assert not is_small(torch.empty(8192, 4096, dtype=torch.bfloat16)), "too large"
    assert not is_small(torch.empty(64, 123, dtype=torch.bfloat16)), "rows that do not begin at 16 bytes"
    assert not is_small(torch.empty(64, 72, dtype=torch.bfloat16)[:, 1:65]), "nor does the first"
    assert not is_small(torch.empty(64, 8, dtype=torch.bfloat16)[:, :4]), "shorter than one copy"
