from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.quantization.fp8 import FP8, FP8Weight, Granularity, KernelFP8Weight
from kernels.ops import fp8_linear as module
from kernels.ops.byte_launch import default_byte_tiles
from kernels.ops.fp8_linear import MAX_TOKENS, fp8_linear
from kernels.ops.projection import Tiles
from kernels.reference.fp8_linear import quantize_fp8
from kernels.registry import REGISTRY
from tests.kernels.oracle import KERNEL_DTYPES

OP = REGISTRY["fp8_linear"]
ONE = Tiles(1, 16, 128, 2, 1)
FEW = Tiles(8, 32, 128, 1, 1)
SIXTEEN = Tiles(16, 16, 128, 4, 1)
WIDE = Tiles(32, 64, 128, 4, 2)


def naive(inputs: dict[str, Any]) -> Tensor:
    """In float64, of the activations' own codes."""
    x_codes, x_scales = quantize_fp8(inputs["x"].cpu(), per_row=inputs["per_token"])
    y = (x_codes.double() * x_scales) @ (inputs["codes"].cpu().double() * inputs["scales"].cpu()).t()
    for more in ("bias", "residual"):
        y = y if inputs[more] is None else y + inputs[more].cpu().double()
    return y


def exact(device: torch.device) -> dict[str, Any]:
    """On Hopper tiles of both are summed in 14 bits over 128 columns."""
    return {"atol": 2e-3, "rtol": 1e-3} if device.type == "cuda" else {"atol": 2e-6, "rtol": 1e-5}


@pytest.mark.parametrize(("num_columns", "per_token"), [(48, True), (208, False), (1024, True)])
@pytest.mark.parametrize(("num_tokens", "tiles"), [(1, ONE), (9, FEW), (11, SIXTEEN), (17, WIDE)], ids=str)
def test_every_cut(num_tokens: int, tiles: Tiles, num_columns: int, per_token: bool, device: torch.device) -> None:
    """Neither rows, tokens nor columns are a multiple of any tile, but for 1,024 columns, which several programs share."""
    inputs = OP.make_inputs(
        torch.float32,
        device,
        num_tokens=num_tokens,
        num_columns=num_columns,
        num_rows=37,
        bias=True,
        residual=True,
        per_token=per_token,
    )
    expected = naive(inputs)
    for output in (fp8_linear(**inputs, tiles=tiles), OP.reference(**inputs)):
        assert isinstance(output, Tensor)
        torch.testing.assert_close(output.cpu().double(), expected, **exact(device))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 17, 70])
def test_defaults_in_every_dtype(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = OP.make_inputs(dtype, device, num_tokens=num_tokens)
    tolerance = OP.tolerances[dtype]
    torch.testing.assert_close(
        fp8_linear(**inputs).cpu().double(), naive(inputs), atol=tolerance.atol, rtol=tolerance.rtol
    )


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_rows_that_cannot_be_loaded_by_16_bytes(num_tokens: int, device: torch.device) -> None:
    """They go through tiles, whatever the number of tokens."""
    inputs = OP.make_inputs(torch.float32, device, num_tokens=num_tokens, num_columns=71, num_rows=33)
    torch.testing.assert_close(fp8_linear(**inputs).cpu().double(), naive(inputs), **exact(device))
    with pytest.raises(ValueError, match="not of whole 16 bytes"):
        fp8_linear(**inputs, tiles=ONE)


@pytest.mark.gpu
def test_what_is_not_finite_stays_visible_and_harms_no_other_token(device: torch.device) -> None:
    """Triton's interpreter reads this format's NaN as 480."""
    inputs = OP.make_inputs(torch.float32, device, num_tokens=20)
    expected = fp8_linear(**inputs)
    for row, bad in ((3, float("nan")), (7, float("inf"))):
        inputs["x"][row, 11] = bad
    for first, last in ((0, 20), (0, 8), (3, 4)):  # every way of multiplying
        y = fp8_linear(**(inputs | {"x": inputs["x"][first:last]}))
        is_bad = [token in (3, 7) for token in range(first, last)]
        assert y.isnan().all(dim=1).tolist() == is_bad
        good = torch.tensor(is_bad, device=device).logical_not()
        torch.testing.assert_close(y[good], expected[first:last][good], **exact(device))


def test_the_library_multiplies_for_many_tokens(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """It rounds before it adds bias and residual."""
    inputs = OP.make_inputs(torch.bfloat16, device, num_tokens=MAX_TOKENS + 1, num_rows=80, bias=True, residual=True)
    calls = []
    product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: calls.append(1) or product(*args, **kwargs))
    if device.type == "cpu":
        monkeypatch.setattr(module, "supports_tma", lambda device: True)
    elif torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the library is asked on Hopper alone")
    expected = naive(inputs)
    tolerance = OP.tolerances[torch.bfloat16]
    close: dict[str, Any] = {"atol": tolerance.atol, "rtol": tolerance.rtol}
    y = fp8_linear(**inputs, output=inputs["residual"])
    assert calls == [1]
    assert y is inputs["residual"]
    torch.testing.assert_close(y.cpu().double(), expected, **close)
    plain: dict[str, Any] = inputs | {"residual": None}
    torch.testing.assert_close(fp8_linear(**plain).cpu().double(), naive(plain), **close)


def test_the_library_is_not_asked_for_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "supports_tma", lambda device: True)
    device = torch.device("cpu")
    fits = OP.make_inputs(torch.bfloat16, device, num_tokens=MAX_TOKENS + 1, num_rows=80)
    many, codes = MAX_TOKENS + 1, fits["codes"]
    assert module._is_for_library(many, torch.bfloat16, codes)
    assert not module._is_for_library(many - 1, torch.bfloat16, codes)
    assert not module._is_for_library(many, torch.float16, codes)
    assert not module._is_for_library(many, torch.bfloat16, codes[:-1])
    assert not module._is_for_library(many, torch.bfloat16, codes[:, :-1])


@pytest.mark.parametrize("num_tokens", [2, 17])
def test_the_residual_may_be_written_over(num_tokens: int, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_tokens=num_tokens, residual=True)
    expected = naive(inputs)
    assert fp8_linear(**inputs, output=inputs["residual"]) is inputs["residual"]
    torch.testing.assert_close(inputs["residual"].cpu().double(), expected, **exact(device))


def test_nothing_to_do(device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    assert fp8_linear(**(inputs | {"x": inputs["x"][:0]})).shape == (0, 77)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.zeros(2, 40)}, "codes has shape"),
        ({"codes": torch.zeros(77, 208, dtype=torch.int8)}, "codes is int8"),
        ({"scales": torch.zeros(77)}, "scales has shape"),
        ({"scales": torch.zeros(77, 1).half()}, "scales is float16"),
        ({"scales": torch.zeros(154, 1)[::2]}, "scales has strides"),
        ({"bias": torch.zeros(76)}, "bias"),
        ({"residual": torch.zeros(5, 76)}, "residual"),
        ({"output": torch.zeros(5, 76)}, "output"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], named: str, device: torch.device) -> None:
    changes = {name: value.to(device) for name, value in changes.items()}
    with pytest.raises(ValueError, match=named):
        fp8_linear(**(OP.make_inputs(torch.float32, device) | changes))


@pytest.mark.parametrize("num_rows", [576, 4096, 28672])
@pytest.mark.parametrize("num_columns", [64, 576, 4096, 14336])
def test_default_tiles_are_ones_that_the_kernels_take(num_rows: int, num_columns: int) -> None:
    for num_tokens in (1, 2, 8, 9, 16, 17, 33, 64, 65, 1000):
        tiles = default_byte_tiles(num_tokens, num_rows, num_columns)
        assert tiles.block_m >= min(num_tokens, 128)
        assert tiles.block_n % 16 == 0
        if tiles.block_m <= 16:
            assert tiles.num_warps <= 2 * num_columns // 128 + 1  # at most one warp of two without a share
        else:
            assert tiles.block_n >= 64
        assert default_byte_tiles(num_tokens, num_rows, num_columns, has_whole_rows=False).block_m > 16


def prepared_for(device: torch.device, packed: FP8Weight) -> FP8Weight:
    """As `prepare` gives it on a GPU."""
    packed = packed.to(str(device))
    if device.type == "cuda":
        prepared = packed.prepare()
        assert isinstance(prepared, KernelFP8Weight)
        return prepared
    assert packed.prepare() is packed
    return KernelFP8Weight(packed.codes, packed.scales, packed.granularity)


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_a_layers_weight(granularity: Granularity, device: torch.device) -> None:
    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))

    packed = FP8(granularity).quantize(values(48, 96) * 0.05)
    prepared = prepared_for(device, packed)
    assert (packed.emulated, prepared.emulated) == (True, False)
    assert (prepared.nbytes, prepared.shape) == (packed.nbytes, packed.shape)
    x, bias, residual = values(5, 96), values(48), values(5, 48)
    x[1] *= 100
    close = exact(device) | {"atol": exact(device)["atol"] * 50}
    torch.testing.assert_close(prepared.linear(x.to(device), bias.to(device)).cpu(), packed.linear(x, bias), **close)
    added = residual.to(device, copy=True)
    prepared.add_to(added, x.to(device), bias.to(device))
    torch.testing.assert_close(added.cpu(), residual + packed.linear(x, bias), **close)


def test_more_inputs_than_a_program_holds_stay_emulated() -> None:
    packed = FP8("channel").quantize(torch.ones(1, 1))
    wide = replace(packed, codes=packed.codes.expand(1, 65537))
    assert wide.prepare() is wide
