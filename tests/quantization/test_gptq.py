"""GPTQ: against closed forms, and against one input at a time in float64 with no Cholesky factor and no blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.quantization.gptq import DAMPING, quantize_gptq
from backend.quantization.group_size import CHANNEL
from backend.quantization.int_weight import ZERO_POINTS, IntWeight, ZeroPoint, fit_grid, quantize_by_rounding
from kernels.reference.int_words import unpack_words


def problem(seed: int, rows: int = 16, columns: int = 96) -> tuple[Tensor, Tensor]:
    """Weights, and the Hessian of inputs of which each is much like its neighbours, and some are large."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    x = torch.randn(4 * columns, columns, generator=generator)
    x = (x + x.roll(1, 1) + x.roll(2, 1) * 0.5) * torch.rand(columns, generator=generator).exp2().square()
    return weight, x.t() @ x / len(x)


def codes_of(packed: IntWeight) -> Tensor:
    return unpack_words(packed.words, packed.bits, packed.in_features)


def points_of(weight: Tensor, bits: int, group_size: int, zero_point: ZeroPoint) -> Tensor:
    """What each code stands for, float64 [rows, columns, 2^bits]."""
    grid = fit_grid(weight, bits, group_size, zero_point)
    size = weight.shape[1] // grid.scales.shape[1]
    codes = torch.arange(2**bits, dtype=torch.float64)
    scales = grid.scales.double()[:, :, None]
    if grid.minimums is not None:
        points = codes * scales + grid.minimums.double()[:, :, None]
    else:
        zeros = torch.full_like(scales, 2 ** (bits - 1)) if grid.zeros is None else grid.zeros.double()[:, :, None]
        points = (codes - zeros) * scales
    return points.repeat_interleave(size, dim=1)


def output_error(packed: IntWeight, weight: Tensor, hessian: Tensor) -> float:
    difference = packed.dequantize().double() - weight.double()
    return float(torch.trace(difference @ hessian.double() @ difference.t()))


@pytest.mark.parametrize("correlation", [0.9, -0.6, 0.3])
def test_of_two_inputs_the_second_makes_up_for_the_first_as_well_as_it_can(correlation: float) -> None:
    weight = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    hessian = torch.tensor([[4.0, 2 * correlation], [2 * correlation, 1.0]])
    codes = codes_of(quantize_gptq(weight, hessian, 4, CHANNEL, "none"))
    points = points_of(weight, 4, CHANNEL, "none")
    first = (points[:, 0] - weight[:, :1]).abs().argmin(1)
    error = weight[:, 0].double() - points[:, 0].gather(1, first[:, None])[:, 0]
    # d/dv of 4 e^2 + 4 c e v + (1 + damping) v^2 is 0 where the second's error v is this:
    best = weight[:, 1].double() + 2 * correlation * error / (1.0 + DAMPING * 2.5)
    second = (points[:, 1] - best[:, None]).abs().argmin(1)
    assert torch.equal(codes, torch.stack((first, second), 1).to(torch.uint8))
    assert not torch.equal(codes, codes_of(quantize_by_rounding(weight, 4, CHANNEL, "none")))


def test_the_larger_input_goes_first() -> None:
    weight = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    hessian = torch.tensor([[4.0, 1.8], [1.8, 1.0]])
    turned = codes_of(quantize_gptq(weight.flip(1), hessian.flip(0, 1), 4, CHANNEL, "none"))
    assert torch.equal(turned.flip(1), codes_of(quantize_gptq(weight, hessian, 4, CHANNEL, "none")))


@pytest.mark.parametrize("zero_point", ZERO_POINTS)
def test_inputs_that_have_nothing_in_common_are_rounded_to_nearest(zero_point: ZeroPoint) -> None:
    weight, _ = problem(0)
    hessian = torch.diag(torch.rand(96, generator=torch.Generator().manual_seed(1)) + 0.01)
    packed = quantize_gptq(weight, hessian, 4, 32, zero_point)
    assert torch.equal(codes_of(packed), codes_of(quantize_by_rounding(weight, 4, 32, zero_point)))


@pytest.mark.parametrize("zero_point", ZERO_POINTS)
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, CHANNEL), (4, 32), (8, 96)])
def test_outputs_err_less_than_of_weights_rounded_to_nearest(bits: int, group_size: int, zero_point: ZeroPoint) -> None:
    for seed in range(6):
        weight, hessian = problem(seed)
        rounded = quantize_by_rounding(weight, bits, group_size, zero_point)
        chosen = quantize_gptq(weight, hessian, bits, group_size, zero_point)
        assert output_error(chosen, weight, hessian) < output_error(rounded, weight, hessian)
        assert chosen.scales.dtype == rounded.scales.dtype
        assert torch.equal(chosen.scales, rounded.scales)  # the grid is that of the weights as they were


@pytest.mark.parametrize("zero_point", ZERO_POINTS)
@pytest.mark.parametrize("block", [1, 7, 128])
def test_codes_are_those_of_one_input_at_a_time(block: int, zero_point: ZeroPoint) -> None:
    """Optimal brain surgery as the paper derives it: the inverse of what is left of the Hessian, anew at every step."""
    weight, hessian = problem(3, rows=8, columns=64)
    points = points_of(weight, 3, 32, zero_point)
    damped = hessian.double() + DAMPING * hessian.double().diagonal().mean() * torch.eye(64, dtype=torch.float64)
    left = hessian.diagonal().argsort(descending=True).tolist()
    current, expected = weight.double(), torch.zeros(8, 64, dtype=torch.uint8)
    while left:
        inverse = torch.linalg.inv(damped[left][:, left])
        column = left[0]
        code = (points[:, column] - current[:, column, None]).abs().argmin(1)
        error = (current[:, column] - points[torch.arange(8), column, code]) / inverse[0, 0]
        current[:, left] -= error[:, None] * inverse[0]
        expected[:, column] = code.to(torch.uint8)
        left = left[1:]
    assert torch.equal(codes_of(quantize_gptq(weight, hessian, 3, 32, zero_point, block=block)), expected)


def test_inputs_that_are_always_zero_are_rounded_and_change_nothing() -> None:
    weight, hessian = problem(5)
    dead = [3, 40, 95]
    hessian[dead], hessian[:, dead] = 0.0, 0.0
    packed = quantize_gptq(weight, hessian, 4, 32, "integer")
    rounded = quantize_by_rounding(weight, 4, 32, "integer")
    assert torch.equal(codes_of(packed)[:, dead], codes_of(rounded)[:, dead])
    assert output_error(packed, weight, hessian) < output_error(rounded, weight, hessian)
    nothing = quantize_gptq(weight, torch.zeros_like(hessian), 4, 32, "integer")
    assert torch.equal(codes_of(nothing), codes_of(rounded))


def test_rows_do_not_depend_on_each_other() -> None:
    """So that projections side by side are quantized as each alone, on the Hessian that they share."""
    weight, hessian = problem(7)
    together = codes_of(quantize_gptq(weight, hessian, 4, 32, "integer"))
    apart = [codes_of(quantize_gptq(part, hessian, 4, 32, "integer")) for part in weight.split([9, 5, 2])]
    assert torch.equal(together, torch.cat(apart))


def test_groups_without_a_step_stay_finite() -> None:
    weight, hessian = problem(8)
    weight[0], weight[1, :32], weight[2] = 0.0, 1e-30, 0.25
    for zero_point in ZERO_POINTS:
        packed = quantize_gptq(weight, hessian, 4, 32, zero_point)
        assert packed.dequantize().isfinite().all()
        assert not packed.dequantize()[0].any()


def test_the_arguments_stay_as_they_are() -> None:
    weight, hessian = problem(9)
    kept = weight.clone(), hessian.clone()
    quantize_gptq(weight, hessian, 4, 32, "integer")
    quantize_gptq(weight.double(), hessian.double(), 4, 32, "integer")
    assert torch.equal(weight, kept[0])
    assert torch.equal(hessian, kept[1])


@pytest.mark.gpu
def test_a_gpu_chooses_as_well_as_a_cpu() -> None:
    """Sums in another order now and then choose another code, from where on all go other ways of the same worth."""
    for seed, zero_point in enumerate(ZERO_POINTS):
        weight, hessian = problem(seed, rows=256, columns=576)
        chosen = quantize_gptq(weight, hessian, 4, 64, zero_point)
        on_gpu = quantize_gptq(weight.cuda(), hessian.cuda(), 4, 64, zero_point)
        assert on_gpu.words.is_cuda
        errors = [output_error(each, weight, hessian) for each in (chosen, on_gpu.to("cpu"))]
        assert errors[1] == pytest.approx(errors[0], rel=0.01)
        assert float((codes_of(on_gpu).cpu() == codes_of(chosen)).float().mean()) > 0.9
