"""The CPU's product of int8 weights and activations: the reference's numbers, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu import threads
from kernels.cpu.row_tiles import to_row_tiles
from kernels.cpu.support import has_cpu_kernels
from kernels.reference import int8_linear as reference

pytestmark = pytest.mark.skipif(not has_cpu_kernels(), reason="needs an x86-64 CPU with AVX2, and llvmlite")

EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}


def linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    from kernels.cpu.int8_linear import int8_linear, to_tiles

    return int8_linear(x, to_tiles(codes), to_row_tiles(scales), bias, out_features=len(codes))


def make_weight(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns)) * 0.05
    return reference.quantize_rows_int8(weight)


def make_x(num_tokens: int, columns: int) -> Tensor:
    return torch.randn(num_tokens, columns, generator=torch.Generator().manual_seed(num_tokens))


@pytest.mark.parametrize(("rows", "columns"), [(96, 192), (64, 64), (37, 71), (130, 34), (5, 160), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_dtypes(rows: int, columns: int, dtype: torch.dtype) -> None:
    codes, scales = make_weight(rows, columns)
    bias = torch.linspace(-1, 1, rows).to(dtype)
    for num_tokens in (1, 2, 3, 4, 5, 16, 33):
        x = make_x(num_tokens, columns).to(dtype)
        y = linear(x, codes, scales, bias)
        assert y.is_contiguous()
        torch.testing.assert_close(y, reference.int8_linear(x, codes, scales, bias), **EXACT)
        torch.testing.assert_close(linear(x, codes, scales), reference.int8_linear(x, codes, scales), **EXACT)


def test_sums_are_exact_integers() -> None:
    """Scales of one say the sums themselves, of activations that are codes."""
    codes = torch.randint(-128, 128, (48, 96), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    x = torch.randint(-128, 128, (6, 96), generator=torch.Generator().manual_seed(1))
    x[:, 5], codes[3] = -128, -128
    expected = x @ codes.long().t()
    values = x.float().clamp(min=-127.5)  # whose scale is 1
    assert torch.equal(linear(values, codes, torch.ones(48, 1)).long(), expected)


def test_the_largest_sum_that_an_int32_holds() -> None:
    columns = reference.MAX_INT32_INPUTS
    codes = torch.full((16, columns), -128, dtype=torch.int8)
    codes[1] = 127
    y = linear(
        torch.full((1, columns), -127.5), codes, torch.ones(16, 1)
    )  # codes of -128, which lie half a step beyond
    assert 2**31 - 1 - 128**2 < 128**2 * columns <= 2**31 - 1
    assert y[0, :2].tolist() == torch.tensor([128**2 * columns, -128 * 127 * columns]).float().tolist()


def test_rows_that_have_no_scale() -> None:
    """Zeros, numbers near both ends of float32, infinities and NaNs, each in a token of its own."""
    codes, scales = make_weight(20, 40)
    x = make_x(9, 40)
    x[0] = 0
    x[1] *= 1e-42
    x[2] *= 1e-45
    x[3] *= 1e38 / x[3].abs().max()
    x[4, 3] = float("inf")
    x[5, 39] = -float("inf")
    x[6, 0] = float("nan")
    x[7, 1:] = 0
    # 190 / 127.5 of the least number is that number: codes would pass 127.
    x[8] = torch.linspace(-190, 190, 40) * 2.0**-149
    y = linear(x, codes, scales)
    torch.testing.assert_close(y, reference.int8_linear(x, codes, scales), **EXACT)
    assert y.isnan().all(1).tolist() == [False] * 4 + [True] * 3 + [False] * 2


def test_halves_round_to_even() -> None:
    x = torch.arange(-126, 128).float()[None] / 2
    x[0, 0] = -127.5  # a token's scale is 1 then
    y = linear(x, torch.eye(254, dtype=torch.int8), torch.ones(254, 1))
    assert torch.equal(y, x.round())
    assert (y[0] % 2 == 0).sum() > (y[0] % 2 == 1).sum()


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales = make_weight(150, 192)
    x = make_x(6, 192)
    expected = linear(x, codes, scales)
    parts: list[int] = []
    pool = threads._pool
    monkeypatch.setattr(threads, "_LEAST_WORK", 1)
    monkeypatch.setattr(threads, "_pool", lambda count: parts.append(count) or pool(count))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(linear(x, codes, scales), expected)
    finally:
        torch.set_num_threads(before)
    assert parts == [1]


def test_no_tokens_views_and_what_does_not_fit() -> None:
    codes, scales = make_weight(24, 64)
    assert linear(torch.empty(0, 64), codes, scales).shape == (0, 24)
    x = make_x(64, 9).t()
    assert torch.equal(linear(x, codes, scales), linear(x.contiguous(), codes, scales))
    with pytest.raises(ValueError, match=r"x \[2, 72\] on cpu for a weight of 64 inputs"):
        linear(torch.ones(2, 72), codes, scales)


def test_tiles_give_the_codes_back() -> None:
    from kernels.cpu.int8_linear import from_tiles, to_tiles

    codes, _ = make_weight(37, 71)
    assert torch.equal(from_tiles(to_tiles(codes), 37, 71), codes)
