"""E4M3: what a cast does at its limit (known fault QZ-3), which codes are nearest, and the product of rounded factors."""

from __future__ import annotations

import math

import pytest
import torch

from backend.quantization.fp8 import FP8, Granularity
from kernels.reference.fp8_linear import cast_fp8, count_saturated, fp8_linear, quantize_fp8
from tests.quantization.noise import expected_error, fp8_steps

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
E4M3 = torch.float8_e4m3fn
FLOAT32_MAX = torch.finfo(torch.float32).max


def random_values(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def value_of(code: int) -> float:
    """By the format's definition: a sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f is NaN."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return math.nan if code & 127 == 127 else math.copysign(magnitude, -1 if code & 128 else 1)


@pytest.mark.parametrize("device", DEVICES)
def test_the_cast_saturates_and_keeps_what_is_not_finite_visible(device: str) -> None:
    x = torch.tensor([447, 448, 464, 465, 1e4, -1e4, FLOAT32_MAX, 0, math.nan, math.inf, -math.inf], device=device)
    expected = torch.tensor([448, 448, 448, 448, 448, -448, 448, 0, math.nan, math.nan, math.nan])
    codes = cast_fp8(x, 1.0)
    assert codes.dtype == E4M3
    torch.testing.assert_close(codes.float().cpu(), expected, rtol=0, atol=0, equal_nan=True)
    # 465, both 1e4 and the largest; what is not finite is no saturation.
    assert count_saturated(x, 1.0) == 4
    assert count_saturated(x[:3], 1.0) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_scale_that_was_rounded_down_gives_no_nan(device: str, dtype: torch.dtype) -> None:
    x = torch.cat((torch.linspace(-30_000, 30_000, 4001), torch.tensor([3e4, -3e4]))).to(device)
    for shrunk in (1.0, 0.95, 0.1):  # 0.1: calibrated on a tenth of the real maximum
        scale = torch.tensor(30_000 / 448 * shrunk, dtype=dtype, device=device).float()
        values = cast_fp8(x, scale).float() * scale
        assert values.isfinite().all()
        assert float(values.abs().max()) == float(448 * scale)
        inside = x.abs() <= 448 * scale
        # Half a step is 2^-4 of a value at most, above the subnormals.
        assert ((values - x).abs() <= (x.abs() * 2**-4).clamp(min=float(scale) * 2**-10) * (1 + 1e-6))[inside].all()
        assert count_saturated(x, scale) == int((x.double().abs() > 464 * scale.double()).sum())
    assert count_saturated(x, scale) > 3000


@pytest.mark.parametrize("device", DEVICES)
def test_every_value_becomes_the_nearest_code_and_halves_the_even_one(device: str) -> None:
    codes = list(range(127))
    values = torch.tensor([value_of(code) for code in codes], dtype=torch.float64)
    assert values[-1] == 448
    assert torch.equal(cast_fp8(values.to(device), 1.0).view(torch.uint8).cpu(), torch.tensor(codes, dtype=torch.uint8))
    middles = ((values[1:] + values[:-1]) / 2).float()
    even = torch.tensor([code if code % 2 == 0 else code + 1 for code in codes[:-1]], dtype=torch.uint8)
    assert torch.equal(cast_fp8(middles.to(device), 1.0).view(torch.uint8).cpu(), even)
    assert torch.equal(cast_fp8(-middles.to(device), 1.0).view(torch.uint8).cpu(), even + 128)
    below = torch.nextafter(middles, torch.zeros(()))
    assert torch.equal(cast_fp8(below.to(device), 1.0).view(torch.uint8).cpu().int(), torch.arange(126).int())


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_weights_err_by_half_a_step_of_the_format(granularity: Granularity) -> None:
    weight = random_values(24, 160) * torch.logspace(-3, 1, 24)[:, None]
    packed = FP8(granularity).quantize(weight)
    if granularity == "channel":
        steps = fp8_steps(weight)
        torch.testing.assert_close(packed.scales.double(), weight.double().abs().amax(1, keepdim=True) / 448)
    else:
        steps = fp8_steps(weight.view(1, -1)).view_as(weight)
        assert packed.scales.unique().item() == pytest.approx(float(weight.abs().max()) / 448, rel=1e-6)
    error = (packed.dequantize().double() - weight.double()).abs()
    assert (error <= steps / 2 * (1 + 1e-5)).all()
    assert (error > steps * 0.4).float().mean() > 0.1
    assert packed.shape == (24, 160)
    assert packed.nbytes == 24 * 160 + 24 * 4
    assert packed.bits_per_weight == 8 + 32 / 160


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_is_that_of_the_rounded_factors(granularity: Granularity, dtype: torch.dtype) -> None:
    packed = FP8(granularity).quantize(random_values(24, 192) * 0.05)
    x, bias = (
        (random_values(7, 192, 1) * torch.logspace(-2, 1, 7)[:, None]).to(dtype),
        random_values(1, 24, 2)[0].to(dtype),
    )
    wide = x.double()
    largest = wide.abs().amax(1, keepdim=True) if granularity == "channel" else wide.abs().amax()
    grid = torch.tensor([value_of(code) for code in range(127)], dtype=torch.float64)
    grid = torch.cat((-grid, grid))
    rounded = grid[((wide / (largest / 448))[:, :, None] - grid).abs().argmin(2)] * (largest / 448)
    expected = rounded @ packed.dequantize().double().t() + bias.double()
    y = packed.linear(x, bias)
    assert y.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=1e-5)
    assert not torch.allclose(rounded, wide, rtol=1e-2)


def test_the_error_is_that_of_uniform_noise() -> None:
    x, weight = random_values(64, 512, 3), random_values(96, 512, 4)
    expected = expected_error(x, weight, fp8_steps(x), fp8_steps(weight))
    error = FP8("channel").quantize(weight).linear(x).double() - x.double() @ weight.double().t()
    assert float(error.norm()) == pytest.approx(expected, rel=0.05)


def test_a_token_does_not_depend_on_the_others_unless_they_share_a_scale() -> None:
    x = random_values(5, 64)
    x[3] *= 300
    for granularity, independent in (("channel", True), ("tensor", False)):
        packed = FP8(granularity).quantize(random_values(16, 64, 1))
        alone = torch.cat([packed.linear(token[None]) for token in x])
        assert torch.allclose(packed.linear(x), alone, rtol=1e-6, atol=1e-6) == independent


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_stays_visible_and_harms_no_other(granularity: Granularity, bad: float) -> None:
    packed = FP8(granularity).quantize(random_values(16, 64, 1))
    x = random_values(5, 64)
    x[2, 7] = 0
    x[0, 0] = 9.0  # the largest either way
    expected = packed.linear(x)
    x[2, 7] = bad
    y = packed.linear(x)
    assert y[2].isnan().all()
    keep = [0, 1, 3, 4]
    assert torch.equal(y[keep], expected[keep])


def test_zeros_give_zeros() -> None:
    packed = FP8("channel").quantize(torch.cat((torch.zeros(1, 64), random_values(15, 64))))
    assert torch.equal(packed.linear(torch.ones(2, 64))[:, 0], torch.zeros(2))
    assert torch.equal(packed.linear(torch.zeros(2, 64)), torch.zeros(2, 16))
    for per_token in (True, False):
        assert torch.equal(
            fp8_linear(torch.zeros(2, 64), packed.codes, packed.scales, per_token=per_token), torch.zeros(2, 16)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("per_row", [True, False])
def test_codes_are_the_same_on_both_devices(per_row: bool) -> None:
    x = random_values(64, 576) * torch.logspace(-4, 4, 64)[:, None]
    codes, scales = quantize_fp8(x, per_row=per_row)
    cuda_codes, cuda_scales = quantize_fp8(x.cuda(), per_row=per_row)
    assert torch.equal(cuda_codes.view(torch.uint8).cpu(), codes.view(torch.uint8))
    assert torch.equal(cuda_scales.cpu(), scales)
