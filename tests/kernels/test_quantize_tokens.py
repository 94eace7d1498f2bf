"""Activations in 8 bits: the reference's codes and scales, bit for bit. The reference is held against the formats elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops import quantize_tokens as module
from kernels.ops.quantize_tokens import quantize_tokens
from kernels.reference.quantize_tokens import quantize_tokens as reference

E4M3 = torch.float8_e4m3fn
FORMATS = [(torch.int8, True), (E4M3, True), (E4M3, False)]
formats = pytest.mark.parametrize(("dtype", "per_token"), FORMATS, ids=str)


def tokens(num_columns: int = 123) -> Tensor:
    """Of ordinary spreads, and one of each kind that needs care: what is not finite is in the last three."""
    x = torch.randn(16, num_columns, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-6, 3, 16)[:, None]
    x[0] = 0
    x[1] *= 1e-38
    x[2] = torch.linspace(-190, 190, num_columns) * 2.0**-149  # codes of so coarse a scale would pass the largest
    x[3] = torch.linspace(-448, 448, num_columns)
    x[4] = torch.arange(num_columns) / 2 - num_columns // 4  # halves between int8's codes
    x[4, 0] = -127.5  # a scale of 1, and itself a half
    x[5] = -(
        2.0 ** -torch.arange(num_columns).clamp(max=20)
    )  # down to what E4M3 has below its normal numbers, and less
    x[13, 5], x[14, 0], x[15, -1] = float("inf"), float("nan"), -float("inf")
    return x


def assert_equal(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(actual[0].view(torch.uint8), expected[0].view(torch.uint8))
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=0, equal_nan=True)


@formats
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_are_the_references(
    x_dtype: torch.dtype, dtype: torch.dtype, per_token: bool, device: torch.device
) -> None:
    x = tokens().to(x_dtype).to(device)
    actual, expected = quantize_tokens(x, dtype, per_token), reference(x, dtype, per_token)
    assert_equal(actual, expected)
    assert (actual[0].dtype, actual[1].dtype, actual[1].shape) == (dtype, torch.float32, (16, 1))
    # On the CPU too: no division by a rounded reciprocal.
    assert_equal((actual[0].cpu(), actual[1].cpu()), reference(x.cpu(), dtype, per_token))
    bad = actual[1] if dtype == torch.int8 else actual[0].float().sum(dim=1, keepdim=True)
    assert bad.isnan().flatten().tolist() == [False] * 13 + [True] * 3


@formats
def test_every_size_and_views(dtype: torch.dtype, per_token: bool, device: torch.device) -> None:
    for num_tokens, num_columns in ((1, 1), (1, 64), (3, 33), (2, 4096)):
        x = tokens(4096)[6 : 6 + num_tokens, :num_columns].to(device)  # rows are further apart than they are long
        assert_equal(quantize_tokens(x, dtype, per_token), reference(x, dtype, per_token))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_nothing_to_do(shape: tuple[int, int], device: torch.device) -> None:
    codes, scales = quantize_tokens(torch.empty(shape, device=device), torch.int8)
    assert codes.shape == shape
    assert torch.equal(scales.cpu(), torch.zeros(shape[0], 1))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.zeros(2, 3, dtype=torch.int32)}, "x is int32"),
        ({"x": torch.zeros(3)}, "x has shape"),
        ({"dtype": torch.uint8}, "dtype is torch.uint8; allowed are torch.float8_e4m3fn, torch.int8"),
        ({"dtype": torch.int8, "per_token": False}, "int8 has a scale per token"),
        ({"x": torch.zeros(1, module.MAX_COLUMNS + 1)}, "65,537 columns; at most 65,536"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        quantize_tokens(**({"x": torch.zeros(2, 3), "dtype": E4M3} | changes))
