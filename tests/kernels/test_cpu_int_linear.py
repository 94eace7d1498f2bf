"""The CPU's product with 4 and 8 bit weights: against float64 within the roundings of a float32 sum, and bit by bit alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.cpu.row_tiles import TILE, from_row_tiles, to_row_tiles
from kernels.cpu.support import has_cpu_kernels
from kernels.reference import int_linear as reference
from kernels.reference.int_words import pack_words, to_chunks

pytestmark = pytest.mark.skipif(not has_cpu_kernels(), reason="needs an x86-64 CPU with AVX2, and llvmlite")

ORIGINS = ("none", "zero_points", "minimums")
# Rows: whole blocks of tiles, one of them, parts of one. Groups: of one chunk, of several, all of a channel.
SHAPES = [(96, 192, 32), (64, 192, 64), (37, 192, 96), (130, 256, 128), (5, 71, 71), (1, 1, 1)]
TOKENS = (1, 2, 3, 4, 5, 16, 33)


class Weight(NamedTuple):
    bits: int
    codes: Tensor  # uint8 [out_features, in_features]
    scales: Tensor
    zero_points: Tensor | None
    minimums: Tensor | None

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """float64: what codes around 0 amount to, and what is the same for a whole group."""
        size = self.codes.shape[1] // self.scales.shape[1]
        scales = self.scales.double().repeat_interleave(size, 1)
        middle = 2 ** (self.bits - 1)
        if self.minimums is not None:
            origin = self.minimums.double().repeat_interleave(size, 1) + middle * scales
        else:
            zeros = middle if self.zero_points is None else self.zero_points.double().repeat_interleave(size, 1)
            origin = (middle - zeros) * scales
        return (self.codes.double() - middle) * scales, origin

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        from kernels.cpu.int_linear import int_linear, prepare_int_linear, to_signed

        words = to_row_tiles(to_signed(pack_words(self.codes, self.bits), self.bits))
        scales, zeros, minimums = (
            None if tensor is None else to_row_tiles(tensor)
            for tensor in (self.scales, self.zero_points, self.minimums)
        )
        assert scales is not None
        prepare_int_linear(words, scales, self.bits, zeros, minimums)
        return int_linear(x, words, scales, self.bits, zeros, minimums, bias, out_features=len(self.codes))


def make_weight(
    bits: int, origin: str, rows: int, columns: int, group_size: int, dtype: torch.dtype = torch.float16
) -> Weight:
    generator = torch.Generator().manual_seed(bits * rows + columns)
    groups = (rows, columns // group_size)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    codes[0, 0], codes[-1, -1] = 2**bits - 1, 0
    scales = (torch.rand(groups, generator=generator) * 0.02 + 1e-3).to(dtype)
    zeros = torch.randint(0, 2**bits, groups, generator=generator, dtype=torch.uint8)
    minimums = (torch.randn(groups, generator=generator) * 0.1).to(dtype)
    return Weight(
        bits, codes, scales, zeros if origin == "zero_points" else None, minimums if origin == "minimums" else None
    )


def make_x(num_tokens: int, columns: int) -> Tensor:
    """Not around 0, so that sums of activations matter."""
    return torch.randn(num_tokens, columns, generator=torch.Generator().manual_seed(num_tokens)) + 0.5


def assert_within_roundings(y: Tensor, weight: Weight, x: Tensor, output_eps: float = 2.0**-24) -> None:
    """Each term of a float32 sum is rounded once for every term that follows it; scale and origin are a few more."""
    codes, origin = weight.parts
    wide = x.double()
    exact = wide @ (codes + origin).t()
    terms = wide.abs() @ (codes.abs() + origin.abs()).t()
    allowed = (x.shape[1] + 8) * 2.0**-24 * terms + output_eps * exact.abs()
    assert ((y.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns", "group_size"), SHAPES)
def test_every_way_of_storing(rows: int, columns: int, group_size: int, bits: int, origin: str) -> None:
    weight = make_weight(bits, origin, rows, columns, group_size)
    for num_tokens in TOKENS:
        x = make_x(num_tokens, columns)
        y = weight.linear(x)
        assert (y.dtype, y.shape, y.is_contiguous()) == (torch.float32, (num_tokens, rows), True)
        assert_within_roundings(y, weight, x)


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_reference_says_the_same(bits: int, origin: str) -> None:
    weight = make_weight(bits, origin, 48, 192, 32)
    x, bias = make_x(7, 192), torch.linspace(-1, 1, 48)
    words = to_chunks(pack_words(weight.codes, bits), bits)
    expected = reference.int_linear(x, words, weight.scales, bits, weight.zero_points, weight.minimums, bias)
    torch.testing.assert_close(weight.linear(x, bias), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_in_float32(bits: int, origin: str) -> None:
    weight = make_weight(bits, origin, 40, 192, 192, torch.float32)
    x = make_x(5, 192)
    assert_within_roundings(weight.linear(x), weight, x)
    rounded = weight._replace(scales=weight.scales.half().float())
    with pytest.raises(AssertionError):
        assert_within_roundings(weight.linear(x), rounded, x)


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_below_the_normal_numbers_of_float16(bits: int) -> None:
    weight = make_weight(bits, "none", 32, 64, 32)
    weight.scales.copy_(torch.full_like(weight.scales, 2.0**-24) * torch.arange(64).view(32, 2))
    x = make_x(3, 64)
    assert weight.linear(x).abs().max() > 0
    assert_within_roundings(weight.linear(x), weight, x)


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_only_the_output_is_rounded_to_the_models_dtype(dtype: torch.dtype, eps: float) -> None:
    weight = make_weight(4, "minimums", 40, 192, 64)
    x = make_x(9, 192).to(dtype)
    y = weight.linear(x)
    assert y.dtype == dtype
    assert_within_roundings(y, weight, x, eps)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tokens_output_depends_neither_on_others_nor_on_threads(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight(bits, "minimums", 150, 192, 64)  # 10 tiles: 5 and 5, or two blocks of 4 and 2
    x = make_x(11, 192)
    together = weight.linear(x)
    for row in range(11):
        assert torch.equal(weight.linear(x[row : row + 1]), together[row : row + 1])
    from kernels.cpu import threads

    parts = []
    monkeypatch.setattr(threads, "_LEAST_WORK", 1)
    pool = threads._pool
    monkeypatch.setattr(threads, "_pool", lambda count: parts.append(count) or pool(count))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(weight.linear(x), together)
        assert torch.equal(weight.linear(x[:1]), together[:1])
    finally:
        torch.set_num_threads(before)
    assert parts == [1, 1]


def test_views_and_no_tokens() -> None:
    weight = make_weight(4, "zero_points", 24, 64, 32)
    x = make_x(64, 9).t()
    assert torch.equal(weight.linear(x), weight.linear(x.contiguous()))
    assert weight.linear(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 24)


def test_infinite_activations_stay_visible_in_their_row() -> None:
    weight = make_weight(4, "minimums", 24, 64, 32)
    x = make_x(3, 64)
    expected = weight.linear(x)
    x[1, 7] = float("nan")
    y = weight.linear(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], expected[[0, 2]])


def test_what_does_not_fit_is_refused() -> None:
    weight = make_weight(4, "none", 24, 64, 32)
    with pytest.raises(ValueError, match=r"x \[2, 72\] on cpu for a weight of 64 inputs"):
        weight.linear(torch.ones(2, 72))
    with pytest.raises(ValueError, match=r"scales are torch\.bfloat16; allowed: torch\.float32, torch\.float16"):
        weight._replace(scales=weight.scales.bfloat16()).linear(torch.ones(2, 64))
    with pytest.raises(ValueError, match=r"minimums are torch\.float32 .* not contiguous torch\.float16"):
        weight._replace(minimums=weight.scales.float()).linear(torch.ones(2, 64))
    with pytest.raises(ValueError, match="8 words in 3 groups"):
        weight._replace(scales=weight.scales[:, :1].expand(-1, 3)).linear(torch.ones(2, 64))


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_tiles_hold_sixteen_rows_abreast(rows: int) -> None:
    matrix = torch.arange(rows * 6).view(rows, 6)
    tiles = to_row_tiles(matrix)
    assert tiles.shape == (-(-rows // TILE), 6, TILE)
    for row in range(rows):
        assert torch.equal(tiles[row // TILE, :, row % TILE], matrix[row])
    assert tiles.sum() == matrix.sum()
    assert torch.equal(from_row_tiles(tiles, rows), matrix)
