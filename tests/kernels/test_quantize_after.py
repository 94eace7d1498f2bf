"""Ops that give 8 bits at once: the codes and scales of the op before and `quantize_tokens` in a row, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check import check_op
from kernels.ops.quantize_tokens import MAX_COLUMNS, quantize_tokens
from kernels.ops.rms_norm import rms_norm
from kernels.ops.rms_norm_quantize import rms_norm_quantize
from kernels.ops.silu_and_mul import silu_and_mul
from kernels.ops.silu_and_mul_quantize import silu_and_mul_quantize
from kernels.registry import REGISTRY

E4M3 = torch.float8_e4m3fn
FLOATS = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
]  # no products of matrices: the interpreter is right in all of them
SHAPES = [(5, 123), (1, 576), (17, 64), (2, 1500), (3, 1)]
formats = pytest.mark.parametrize("dtype", [E4M3, torch.int8], ids=str)
Both = tuple[Callable[[], tuple[Tensor, Tensor]], Callable[[], Tensor]]


def norm(x: Tensor, dtype: torch.dtype) -> Both:
    weight = torch.randn(x.shape[1], device=x.device, generator=torch.Generator(x.device).manual_seed(1)).to(x.dtype)
    return lambda: rms_norm_quantize(x, weight, 1e-5, dtype), lambda: rms_norm(x, weight, 1e-5)


def gate(x: Tensor, dtype: torch.dtype) -> Both:
    x = torch.cat((x, x.flip(1).mul(2)), dim=1)
    return lambda: silu_and_mul_quantize(x, dtype), lambda: silu_and_mul(x)


ops = pytest.mark.parametrize("op", [norm, gate])


def tokens(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return (x * torch.logspace(-2, 1, shape[0])[:, None]).to(dtype).to(device)


def assert_in_a_row(op: Callable[[Tensor, torch.dtype], Both], x: Tensor, dtype: torch.dtype) -> None:
    joint, before = op(x, dtype)
    (codes, scales), between = joint(), before()
    expected_codes, expected_scales = quantize_tokens(between, dtype)
    assert (codes.dtype, scales.dtype, scales.shape) == (dtype, torch.float32, (len(x), 1))
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


@ops
@formats
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_is_the_two_ops_in_a_row(
    op: Callable[..., Both], x_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    for shape in SHAPES:
        assert_in_a_row(op, tokens(shape, x_dtype, device), dtype)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@ops
@formats
def test_what_is_not_finite_stays_in_its_token(
    op: Callable[..., Both], dtype: torch.dtype, device: torch.device
) -> None:
    x = tokens((4, 70), torch.float32, device)
    x[0] = 0
    x[1, 3], x[2, 69] = float("inf"), float("nan")
    assert_in_a_row(op, x, dtype)
    codes, scales = op(x, dtype)[0]()
    bad = scales if dtype == torch.int8 else codes.float().sum(dim=1)
    assert bad.isnan().flatten().tolist() == [False, True, True, False]
    assert not codes[0].float().any()


@formats
def test_takes_rows_of_a_wider_tensor(dtype: torch.dtype, device: torch.device) -> None:
    wide = tokens((3, 400), torch.float16, device)
    x = wide[:, 30:330]
    assert x.stride() == (400, 1)
    assert torch.equal(silu_and_mul_quantize(x, dtype)[0], silu_and_mul_quantize(x.contiguous(), dtype)[0])
    weight = torch.ones(300, dtype=torch.float16, device=device)
    joint, contiguous = (rms_norm_quantize(rows, weight, 1e-5, dtype) for rows in (x, x.contiguous()))
    assert torch.equal(joint[0], contiguous[0])
    assert torch.equal(joint[1], contiguous[1])


@formats
@pytest.mark.parametrize("name", ["rms_norm_quantize", "silu_and_mul_quantize"])
def test_over_poisoned_memory(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """All of both outputs is written, and what the reference says."""
    for x_dtype in FLOATS:
        check = check_op(REGISTRY[name], x_dtype, device, sizes={"num_tokens": 7, "to": dtype})
        assert check.passed, check.problem


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_nothing_to_do(shape: tuple[int, int], device: torch.device) -> None:
    x, weight = torch.empty(shape, device=device), torch.empty(shape[1], device=device)
    for codes, scales in (rms_norm_quantize(x, weight, 0.0, E4M3), silu_and_mul_quantize(torch.cat((x, x), 1), E4M3)):
        assert codes.shape == shape
        assert torch.equal(scales.cpu(), torch.zeros(shape[0], 1))


@pytest.mark.parametrize(
    ("op", "changes", "named"),
    [
        (rms_norm_quantize, {"x": torch.zeros(2, 4).int()}, "x is int32"),
        (rms_norm_quantize, {"weight": torch.ones(3)}, r"weight has shape \[3\]; expected \[4\]"),
        (rms_norm_quantize, {"dtype": torch.uint8}, "dtype is torch.uint8; allowed are"),
        (silu_and_mul_quantize, {"x": torch.zeros(4, 2).t()}, "x has stride 2"),
        (silu_and_mul_quantize, {"x": torch.zeros(2, 3)}, "x has 3 columns; expected an even number"),
        (silu_and_mul_quantize, {"dtype": torch.uint8}, "dtype is torch.uint8; allowed are"),
        (silu_and_mul_quantize, {"x": torch.zeros(1, 2 * MAX_COLUMNS + 2)}, "65,537 columns; at most 65,536"),
    ],
)
def test_bad_arguments_are_refused(op: Callable[..., Any], changes: dict[str, Any], named: str) -> None:
    inputs: dict[str, Any] = {"x": torch.zeros(2, 4), "dtype": E4M3}
    if op is rms_norm_quantize:
        inputs |= {"weight": torch.ones(4), "eps": 0.0}
    with pytest.raises(ValueError, match=named):
        op(**(inputs | changes))
