"""Rounding to a grid of integers: against the definition in float64, group by group, and what has no step."""

from __future__ import annotations

import pytest
import torch

from backend.quantization.group_size import CHANNEL
from backend.quantization.int_weight import ZERO_POINTS, ZeroPoint, fit_grid, pack, quantize_by_rounding, round_to_grid
from kernels.reference.int_words import pack_words, unpack_words


def random_weight(rows: int = 24, columns: int = 192, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 0.05 + 0.01


@pytest.mark.parametrize("bits", range(2, 9))
def test_words_hold_codes_from_their_lowest_bits_on(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (5, 71), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    words = pack_words(codes, bits)
    per_word = 32 // bits
    assert words.shape == (5, -(-71 // per_word))
    for row in range(5):
        for index, word in enumerate(words[row].tolist()):
            first = codes[row, index * per_word : (index + 1) * per_word].tolist()
            assert word % 2**32 == sum(code << (bits * place) for place, code in enumerate(first))
    assert torch.equal(unpack_words(words, bits, 71), codes)


@pytest.mark.parametrize("zero_point", ZERO_POINTS)
@pytest.mark.parametrize("group_size", [32, 96, CHANNEL])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_each_weight_becomes_the_nearest_point_of_its_grid(bits: int, group_size: int, zero_point: ZeroPoint) -> None:
    weight = random_weight()
    packed = quantize_by_rounding(weight, bits, group_size, zero_point)
    size = 192 if group_size == CHANNEL else group_size
    assert packed.group_size == size
    steps = packed.scales.double().repeat_interleave(size, dim=1)
    codes = torch.arange(2**bits, dtype=torch.float64)
    if zero_point == "float":
        assert packed.minimums is not None
        origin = packed.minimums.double().repeat_interleave(size, dim=1)
    else:
        zeros = packed.zero_points if zero_point == "integer" else torch.full_like(packed.scales, 2 ** (bits - 1))
        assert zeros is not None
        origin = -zeros.double().repeat_interleave(size, dim=1) * steps
    grid = origin[:, :, None] + codes * steps[:, :, None]
    nearest = (grid - weight.double()[:, :, None]).abs().amin(2)
    error = (packed.dequantize().double() - weight.double()).abs()
    torch.testing.assert_close(error, nearest, rtol=0, atol=1e-6)


@pytest.mark.parametrize("zero_point", ZERO_POINTS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nothing_lies_further_off_than_half_a_step(bits: int, zero_point: ZeroPoint) -> None:
    """Of a scale per channel, which is not rounded to 16 bits."""
    weight = random_weight()
    packed = quantize_by_rounding(weight, bits, CHANNEL, zero_point)
    low, high = weight.double().amin(1), weight.double().amax(1)
    if zero_point == "none":
        step = 2 * torch.maximum(-low, high) / (2**bits - 1)
    else:  # an integer zero point has to hold 0, which lies inside here
        step = (high - low) / (2**bits - 1)
    # An integer zero point is rounded, by which both ends of the range move by half a step at most.
    limit = step * (1.0 if zero_point == "integer" else 0.5)
    error = (packed.dequantize().double() - weight.double()).abs().amax(1)
    assert (error <= limit * (1 + 1e-5)).all()
    assert error.max() > 0.3 * step.max()


@pytest.mark.parametrize("zero_point", ZERO_POINTS)
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-8, 0.125, -3.0, 30000.0])
def test_groups_of_one_value(value: float, bits: int, zero_point: ZeroPoint) -> None:
    """Zeros are exact, a constant is the constant within a step, and nothing is NaN."""
    weight = random_weight(4, 128)
    weight[1, 32:64] = value
    weight[2] = value
    for group_size in (32, CHANNEL):
        packed = quantize_by_rounding(weight, bits, group_size, zero_point)
        dequantized = packed.dequantize()
        assert dequantized.isfinite().all()
        size = 128 if group_size == CHANNEL else 32
        steps = packed.scales.float().repeat_interleave(size, dim=1)
        constant = torch.zeros_like(weight, dtype=torch.bool)
        constant[2] = True
        if group_size == 32:
            constant[1, 32:64] = True
        error = (dequantized - weight).abs()[constant]
        if value == 0:
            assert torch.equal(dequantized[constant], torch.zeros_like(error))
        else:
            rounding = max(abs(value) * 2**-11, 2**-25)  # of a minimum or a step in float16
            assert (error <= steps[constant] / 2 + rounding * 2**bits).all()
        assert packed.linear(torch.ones(1, 128)).isfinite().all()


def test_weights_that_lie_on_a_grid_of_floating_minimums_come_back() -> None:
    """As those of Q4_1 do, in groups of 32. A grid with a code for 0 in each group cannot hold them."""
    generator = torch.Generator().manual_seed(3)
    steps = (torch.rand(8, 6, generator=generator) * 0.01 + 1e-3).half().float()
    minimums = (torch.randn(8, 6, generator=generator) * 0.05).half().float()
    codes = torch.randint(0, 16, (8, 6, 32), generator=generator)
    codes[:, :, 0], codes[:, :, 1] = 0, 15  # the ends of a group are codes of it
    weight = (codes * steps[:, :, None] + minimums[:, :, None]).flatten(1)
    exact = quantize_by_rounding(weight, 4, 32, "float")
    torch.testing.assert_close(exact.dequantize(), weight, rtol=0, atol=1e-6)
    rounded = quantize_by_rounding(weight, 4, 32, "integer")
    assert (rounded.dequantize() - weight).abs().amax() > 1e-3


def test_rows_do_not_depend_on_each_other() -> None:
    """So that projections side by side are quantized as each alone."""
    weight = random_weight(30, 64)
    together = quantize_by_rounding(weight, 4, 32, "float").dequantize()
    apart = [quantize_by_rounding(part, 4, 32, "float").dequantize() for part in weight.split([18, 6, 6])]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize(
    ("bits", "group_size", "expected"), [(4, 64, 4.5), (4, 32, 5.0), (3, CHANNEL, 3.2), (8, CHANNEL, 8)]
)
def test_bits_per_weight_count_all_that_is_stored(bits: int, group_size: int, expected: float) -> None:
    packed = quantize_by_rounding(random_weight(64, 960), bits, group_size, "float")
    channel_bits = 64 / 960 if group_size == CHANNEL else 0  # a scale and a minimum in 32 bits each
    assert packed.bits_per_weight == pytest.approx(expected + channel_bits)
    assert packed.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in packed.tensors().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_is_that_of_the_dequantized_weight(dtype: torch.dtype) -> None:
    packed = quantize_by_rounding(random_weight(), 4, 64, "integer")
    x = torch.randn(7, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(24, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = x.double() @ packed.dequantize().to(dtype).double().t() + bias.double()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(packed.linear(x, bias).double(), expected, rtol=tolerance, atol=tolerance)


def test_codes_chosen_elsewhere_are_kept() -> None:
    weight = random_weight()
    grid = fit_grid(weight, 4, 32, "integer")
    codes = round_to_grid(weight, grid, 4)
    packed = pack((codes + 1).clamp(max=15), grid, 4)
    assert torch.equal(unpack_words(packed.words, 4, 192), (codes + 1).clamp(max=15))
