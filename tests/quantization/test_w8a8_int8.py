"""int8 weights and activations: integers exactly, scales and zeros, and the error that rounding both lets expect."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from backend.quantization.w8a8_int8 import W8A8Int8
from kernels.reference.int8_linear import MAX_INT32_INPUTS, multiply_int8, quantize_rows_int8, quantize_tokens_int8
from tests.quantization.noise import expected_error, int8_steps

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_values(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 7, 3), (1, 576, 40), (5, 96, 1376), (17, 33, 1), (32, 64, 16), (0, 64, 8)])
def test_sums_are_exact_integers(device: str, shape: tuple[int, int, int]) -> None:
    num_tokens, in_features, out_features = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randint(-128, 128, (num_tokens, in_features), generator=generator, dtype=torch.int8)
    weight = torch.randint(-128, 128, (out_features, in_features), generator=generator, dtype=torch.int8)
    x[-1:], weight[-1] = -128, -128
    expected = x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T
    y = multiply_int8(x.to(device), weight.to(device)).cpu()
    assert y.dtype == torch.float32
    assert np.array_equal(y.double().numpy(), expected)


@pytest.mark.parametrize("in_features", [131_071, 131_072])
def test_sums_beyond_an_int32_do_not_wrap(in_features: int) -> None:
    """128 x 128 fits 131,071 times."""
    assert MAX_INT32_INPUTS == 131_071
    least, largest = (torch.full((1, in_features), code, dtype=torch.int8) for code in (-128, 127))
    assert multiply_int8(least, least).item() == np.float32(128 * 128 * in_features)
    assert multiply_int8(least, largest).item() == np.float32(-128 * 127 * in_features)


def test_rows_become_the_nearest_codes_of_their_scale() -> None:
    x = random_values(20, 96) * torch.logspace(-30, 30, 20)[:, None]
    codes, scales = quantize_rows_int8(x)
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (20, 1))
    wide = x.double()
    torch.testing.assert_close(scales.double(), wide.abs().amax(1, keepdim=True) / 127, rtol=1e-6, atol=0)
    grid = torch.arange(-127, 128, dtype=torch.float64)
    nearest = ((wide / scales.double())[:, :, None] - grid).abs().amin(2)
    error = (wide / scales.double() - codes.double()).abs()
    torch.testing.assert_close(error, nearest, rtol=0, atol=1e-4)
    assert (codes.int().abs().amax(1) == 127).all()


def test_tokens_become_the_nearest_of_256_codes() -> None:
    """The largest magnitude lies 127.5 steps from 0: a positive one becomes 127, a negative one that is a half -128."""
    x = random_values(20, 96) * torch.logspace(-30, 30, 20)[:, None]
    x[3] = torch.linspace(-127.5, 100, 96)
    x[4] = torch.linspace(-100, 127.5, 96)
    codes, scales = quantize_tokens_int8(x)
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (20, 1))
    wide = x.double()
    torch.testing.assert_close(scales.double(), wide.abs().amax(1, keepdim=True) / 127.5, rtol=1e-6, atol=0)
    grid = torch.arange(-128, 128, dtype=torch.float64)
    nearest = ((wide / scales.double())[:, :, None] - grid).abs().amin(2)
    assert float(nearest.max()) < 0.5 + 1e-4
    error = (wide / scales.double() - codes.double()).abs()
    torch.testing.assert_close(error, nearest, rtol=0, atol=1e-4)
    assert (codes[3, 0], codes[4, -1]) == (-128, 127)


def test_tokens_are_rounded_as_compressed_tensors_does() -> None:
    """Bit for bit, zeros and numbers near both ends of float32 too."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args = quantization.QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    x = random_values(40, 96) * torch.logspace(-44, 37, 40)[:, None]
    x[5], x[6, 1:] = 0, 0
    x[7] = torch.linspace(-63.75, 63.5, 96).mul(2).round().div(2)  # halves between codes
    x[7, 0] = -127.5
    x[8] = -x[7]
    module = torch.nn.Linear(96, 1)
    module.quantization_status = quantization.QuantizationStatus.COMPRESSED
    expected = forward.forward_quantize(module, x[None], "input", args)[0]
    codes, scales = quantize_tokens_int8(x)
    assert torch.equal(codes.float() * scales, expected)
    assert {-128, 127} <= set(codes.flatten().tolist())


@pytest.mark.parametrize("quantize", [quantize_rows_int8, quantize_tokens_int8])
def test_values_below_normal_numbers(quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """Where a scale has one significant bit or none."""
    x = torch.tensor([[1e-44, -1e-44, 0], [4e-43, -3e-43, 1e-43], [1.5e-44 * 127, 0, -1e-43]])
    codes, scales = quantize(x)
    values = codes.float() * scales
    assert values.isfinite().all()
    assert ((values - x).abs() <= x.abs().amax(1, keepdim=True) / 2 + 1e-44).all()


def test_weights_take_a_byte_and_a_scale_per_row() -> None:
    packed = W8A8Int8().quantize(random_values(24, 160))
    assert packed.shape == (24, 160)
    assert packed.nbytes == 24 * 160 + 24 * 4
    assert packed.bits_per_weight == 8 + 32 / 160
    assert torch.equal(packed.dequantize(), packed.codes.float() * packed.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_is_that_of_the_rounded_factors(dtype: torch.dtype) -> None:
    packed = W8A8Int8().quantize(random_values(24, 192) * 0.05)
    x = (random_values(7, 192, 1) * torch.logspace(-2, 1, 7)[:, None]).to(dtype)
    bias = random_values(1, 24, 2)[0].to(dtype)
    scales = x.float().abs().amax(1, keepdim=True) / 127.5
    codes = (x.float() / scales).round().clamp(-128, 127)  # float32: a third of the largest lies in the middle of two
    rounded = codes.double() * scales.double()
    expected = rounded @ packed.dequantize().double().t() + bias.double()
    y = packed.linear(x, bias)
    assert y.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=1e-5)


def test_the_error_never_passes_half_a_step_of_each_factor() -> None:
    """|error| <= sum |x| d/2 + e/2 |w| + e d/4, of steps d of the weight's row and e of the token."""
    x, weight = random_values(64, 512, 3), random_values(96, 512, 4)
    steps, token_steps = int8_steps(weight), int8_steps(x, levels=255)
    limit = x.double().abs() @ (steps / 2).t() + token_steps / 2 @ (weight.double().abs() + steps / 2).t()
    error = W8A8Int8().quantize(weight).linear(x).double() - x.double() @ weight.double().t()
    assert (error.abs() <= limit).all()


def test_the_error_is_that_of_uniform_noise() -> None:
    x, weight = random_values(64, 512, 3), random_values(96, 512, 4)
    expected = expected_error(x, weight, int8_steps(x, levels=255), int8_steps(weight))
    error = W8A8Int8().quantize(weight).linear(x).double() - x.double() @ weight.double().t()
    assert float(error.norm()) == pytest.approx(expected, rel=0.05)


def test_a_token_of_zeros_gives_zeros_and_its_neighbours_do_not_matter() -> None:
    packed = W8A8Int8().quantize(random_values(16, 64))
    x = random_values(4, 64, 1)
    x[1] = 0
    y = packed.linear(x)
    assert torch.equal(y[1], torch.zeros(16))
    assert torch.equal(y, torch.cat([packed.linear(token[None]) for token in x]))
    bias = random_values(1, 16, 2)[0]
    assert torch.equal(packed.linear(x, bias)[1], bias)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_stays_visible_and_harms_no_other(bad: float) -> None:
    packed = W8A8Int8().quantize(random_values(16, 64))
    x = random_values(4, 64, 1)
    expected = packed.linear(x)
    x[2, 5] = bad
    y = packed.linear(x)
    assert y[2].isnan().all()
    assert torch.equal(y[[0, 1, 3]], expected[[0, 1, 3]])
