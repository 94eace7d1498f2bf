from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backend.quantization.w8a8_int8 import KernelW8A8Weight, W8A8Int8
from kernels.ops.int8_linear import int8_linear
from kernels.ops.projection import Tiles
from kernels.registry import REGISTRY
from tests.kernels.oracle import KERNEL_DTYPES

OP = REGISTRY["int8_linear"]
ONE = Tiles(1, 16, 128, 2, 1)
FEW = Tiles(8, 32, 128, 1, 1)
SIXTEEN = Tiles(16, 16, 128, 4, 1)
WIDE = Tiles(32, 64, 128, 4, 2)
CUTS = pytest.mark.parametrize(("num_tokens", "tiles"), [(1, ONE), (9, FEW), (11, SIXTEEN), (17, WIDE)], ids=str)


def integers(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randint(-128, 128, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


@CUTS
@pytest.mark.parametrize("num_columns", [48, 208, 71, 1024])
def test_sums_are_exact_integers(num_tokens: int, tiles: Tiles, num_columns: int, device: torch.device) -> None:
    """Scales of one say the sums themselves, of activations that are codes. 1,024 columns are shared by several programs."""
    x, codes = integers(num_tokens, num_columns, 0), integers(37, num_columns, 1)
    x[:, 5], codes[3] = -128, -128
    expected = x.long() @ codes.long().t()
    wanted = tiles if num_columns % 16 == 0 else None
    values = x.float().clamp(min=-127.5)  # whose scale is 1
    y = int8_linear(values.to(device), codes.to(device), torch.ones(37, 1, device=device), tiles=wanted)
    assert torch.equal(y.cpu().long(), expected)


@CUTS
def test_sums_beyond_what_float32_counts(num_tokens: int, tiles: Tiles, device: torch.device) -> None:
    columns = 8192
    codes = torch.full((2, columns), 127, dtype=torch.int8, device=device)
    codes[1, 0] = 126
    x = torch.full((num_tokens, columns), 127.0, device=device)
    x[:, 0] = 127.5  # a token's scale is 1 then, and this its code 127
    x[:, 1:3] = 126.0
    y = int8_linear(x, codes, torch.ones(2, 1, device=device), tiles=tiles)
    exact = 127 * (127 * (columns - 2) + 2 * 126)
    assert exact > 2**26
    rounded = torch.tensor([exact, exact - 127]).float()
    assert torch.equal(y.cpu(), rounded.expand(num_tokens, 2))


@CUTS
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_every_dtype(num_tokens: int, tiles: Tiles, dtype: torch.dtype, device: torch.device) -> None:
    sizes = {"num_tokens": num_tokens, "num_rows": 37}
    inputs = OP.make_inputs(dtype, device, bias=True, residual=True, **sizes)
    inputs["x"][:, 7] = inputs["x"].abs().amax(1)  # the largest is positive, and 127 however its quotient is rounded
    x = inputs["x"].double()
    scales = (x.abs().amax(1, keepdim=True).float() / 127.5).double()
    # A quotient within float32's rounding of another half may become either code: such inputs are left out.
    doubtful = (((x / scales).frac().abs() - 0.5).abs() < 1e-4) & (x / scales < 127)
    assert doubtful.double().mean() < 0.01
    inputs["x"][doubtful], x[doubtful] = 0, 0
    rounded = (x / scales).round().clamp(max=127) * scales
    expected = rounded @ (inputs["codes"].double() * inputs["scales"]).t() + inputs["bias"] + inputs["residual"]
    tolerance = OP.tolerances[dtype]
    close: dict[str, Any] = {"atol": max(tolerance.atol, 2e-6), "rtol": tolerance.rtol}
    for output in (int8_linear(**inputs, tiles=tiles), int8_linear(**inputs), OP.reference(**inputs)):
        assert isinstance(output, Tensor)
        torch.testing.assert_close(output.double(), expected, **close)


def test_without_bias_and_residual_results_are_the_references(device: torch.device) -> None:
    """Bit for bit: whole sums, and two products in the same order."""
    for num_tokens in (1, 5, 20):
        inputs = OP.make_inputs(torch.float32, device, num_tokens=num_tokens)
        inputs["x"][0] = 0
        inputs["x"][-1, 3] = float("nan")
        y = int8_linear(**inputs)
        torch.testing.assert_close(y, OP.reference(**inputs), rtol=0, atol=0, equal_nan=True)
        assert y.isnan().all(dim=1).tolist() == [False] * (num_tokens - 1) + [True]


@pytest.mark.parametrize("num_tokens", [2, 17])
def test_the_residual_may_be_written_over(num_tokens: int, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_tokens=num_tokens, residual=True)
    expected = OP.reference(**inputs)
    assert int8_linear(**inputs, output=inputs["residual"]) is inputs["residual"]
    torch.testing.assert_close(inputs["residual"], expected, rtol=1e-6, atol=1e-6)


def test_nothing_to_do(device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    assert int8_linear(**(inputs | {"x": inputs["x"][:0]})).shape == (0, 77)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.zeros(2, 40)}, "codes has shape"),
        ({"codes": torch.zeros(77, 208, dtype=torch.uint8)}, "codes is uint8"),
        ({"scales": torch.zeros(77)}, "scales has shape"),
        ({"bias": torch.zeros(77).half()}, "bias is float16"),
        ({"residual": torch.zeros(4, 77)}, "residual"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], named: str, device: torch.device) -> None:
    changes = {name: value.to(device) for name, value in changes.items()}
    with pytest.raises(ValueError, match=named):
        int8_linear(**(OP.make_inputs(torch.float32, device) | changes))


def test_a_layers_weight(device: torch.device) -> None:
    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))

    packed = W8A8Int8().quantize(values(48, 96) * 0.05)
    on_device = packed.to(str(device))
    prepared = on_device.prepare() if device.type == "cuda" else KernelW8A8Weight(packed.codes, packed.scales)
    assert isinstance(prepared, KernelW8A8Weight)
    assert (packed.emulated, prepared.emulated) == (True, False)
    assert (prepared.nbytes, prepared.shape) == (packed.nbytes, packed.shape)
    x, bias, residual = values(5, 96), values(48), values(5, 48)
    expected = packed.linear(x, bias)
    y = prepared.linear(x.to(device), bias.to(device)).cpu()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    added = residual.to(device, copy=True)
    prepared.add_to(added, x.to(device), bias.to(device))
    torch.testing.assert_close(added.cpu(), residual + expected, rtol=1e-6, atol=1e-6)
