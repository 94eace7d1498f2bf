from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.code_launch import MAGIC, few_tokens_options
from kernels.ops.int_codes import byte_pairs, signed_scaling
from kernels.ops.int_linear import MAX_TOKENS, int_linear
from kernels.ops.projection import Tiles
from kernels.reference.code_grid import CodeGrid
from kernels.reference.int_words import from_chunks, pack_words, to_chunks, unpack_words
from kernels.registry import REGISTRY
from tests.kernels.code_oracle import naive_matrix, stored_code
from tests.kernels.oracle import KERNEL_DTYPES, bfloat16_with

OP = REGISTRY["int_linear"]
ONE = Tiles(1, 16, 128, 2, 1)
FEW = Tiles(8, 32, 128, 1, 1)
MANY = Tiles(16, 16, 128, 4, 1)
REGISTERS = Tiles(32, 128, 128, 4, 1)
SHARED = Tiles(64, 64, 128, 4, 2)


def naive(inputs: dict[str, Any]) -> Tensor:
    """In float64."""
    grid = CodeGrid(*(inputs[name] for name in ("bits", "scales", "zero_points", "minimums")))
    y = inputs["x"].double() @ naive_matrix(inputs["words"], grid, inputs["x"].shape[1]).t()
    for more in ("bias", "residual"):
        y = y if inputs[more] is None else y + inputs[more].double()
    return y.cpu()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_columns", [96, 256])
def test_chunks_deal_columns_out_over_their_words(bits: int, num_columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (3, num_columns * bits // 32), generator=generator).to(torch.int32)
    chunks = to_chunks(words, bits)
    assert chunks.shape == (3, -(-num_columns // 128) * 4 * bits)
    stored = [[stored_code(row, column, bits) for column in range(num_columns)] for row in chunks.tolist()]
    assert stored == unpack_words(words, bits, num_columns).tolist()
    assert torch.equal(from_chunks(chunks, bits, num_columns), words)


ORIGINS = ("none", "integer", "float")
STORED = (
    (4, 192, 32),
    (4, 320, 64),
    (4, 96, 96),
    (4, 256, 128),
    (8, 384, 192),
    (8, 96, 32),
    (8, 320, 320),
)  # bits, columns, group size
BATCHES = ((1, ONE), (9, FEW), (11, MANY), (17, REGISTERS), (33, SHARED))


@pytest.mark.parametrize(
    ("num_tokens", "tiles", "bits", "num_columns", "group_size", "origin"),
    # Every two of batch, storage and origin meet.
    [
        (*batch, *stored, ORIGINS[(row + column) % 3])
        for row, batch in enumerate(BATCHES)
        for column, stored in enumerate(STORED)
    ],
    ids=str,
)
def test_every_way_of_storing(
    num_tokens: int, tiles: Tiles, bits: int, num_columns: int, group_size: int, origin: str, device: torch.device
) -> None:
    """Neither rows, tokens nor columns are a multiple of any tile."""
    sizes = {"num_columns": num_columns, "group_size": group_size, "num_rows": 37, "num_tokens": num_tokens}
    inputs = OP.make_inputs(torch.float32, device, bits=bits, origin=origin, bias=True, residual=True, **sizes)
    expected = naive(inputs).float()
    for output in (int_linear(**inputs, tiles=tiles), OP.reference(**inputs)):
        assert isinstance(output, Tensor)
        torch.testing.assert_close(output.cpu(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_tokens", "tiles", "num_columns", "bits", "origin"),
    [(1, ONE, 512, 4, "float"), (9, FEW, 256, 8, "integer"), (11, MANY, 1024, 4, "none"), (1, ONE, 1024, 8, "none")],
    ids=str,
)
def test_shares_that_all_have_the_same_full_chunks(
    num_tokens: int, tiles: Tiles, num_columns: int, bits: int, origin: str, device: torch.device
) -> None:
    """They are loaded without masks."""
    assert few_tokens_options(num_columns, tiles, bits, "none")["EVEN"]
    sizes = {"num_columns": num_columns, "group_size": 128, "num_rows": 21, "num_tokens": num_tokens}
    inputs = OP.make_inputs(torch.float32, device, bits=bits, origin=origin, **sizes)
    torch.testing.assert_close(int_linear(**inputs, tiles=tiles).cpu().double(), naive(inputs), atol=2e-5, rtol=1e-5)


SIGNED = [("none", 32), ("none", None)]  # codes with nothing but scales: of groups, and of rows


@pytest.mark.parametrize(("num_columns", "even"), [(4096, True), (2400, False)])
@pytest.mark.parametrize(
    ("dtype", "origin", "group_size"),
    [
        (torch.float32, "float", 32),
        *((dtype, *signed) for dtype in (torch.float32, torch.float16) for signed in SIGNED),
        *bfloat16_with(SIGNED),
    ],
)
def test_long_shares_of_eight_warps(
    num_columns: int, even: bool, dtype: torch.dtype, origin: str, group_size: int | None, device: torch.device
) -> None:
    """More of x is under way in them; with 19 chunks of 128 columns one share has a single chunk, and one has none."""
    tiles = Tiles(16, 64, 128, 8, 1)
    options = few_tokens_options(num_columns, tiles, 8, origin)
    assert (options["SHARES"], options["ONCE"], options["EVEN"]) == (8, False, even)
    sizes = {"num_columns": num_columns, "group_size": group_size or num_columns, "num_rows": 21, "num_tokens": 9}
    inputs = OP.make_inputs(dtype, device, bits=8, origin=origin, **sizes)
    y = int_linear(**inputs, output=torch.empty(9, 21, device=device), tiles=tiles)
    torch.testing.assert_close(y.cpu().double(), naive(inputs), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_tokens", "tiles"), [(17, REGISTERS), (33, SHARED)], ids=str)
@pytest.mark.parametrize(("num_columns", "group_size"), [(1120, 32), (4224, 128)])
def test_sums_split_over_programs(
    num_tokens: int, tiles: Tiles, num_columns: int, group_size: int, device: torch.device
) -> None:
    """Of 9 chunks two programs have 5 and 4; of 33, seven have 5 or 3 and an eighth has none."""
    sizes = {"num_columns": num_columns, "group_size": group_size, "num_rows": 21, "num_tokens": num_tokens}
    inputs = OP.make_inputs(torch.float32, device, origin="integer", **sizes)
    torch.testing.assert_close(int_linear(**inputs, tiles=tiles).cpu().double(), naive(inputs), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES[1:])
@pytest.mark.parametrize("origin", ORIGINS)
def test_what_stands_above_codes_leaves_nothing_behind(origin: str, dtype: torch.dtype, device: torch.device) -> None:
    """Where x is far from 0, the constant above every code is a hundred times the result, before it is taken off."""
    inputs = OP.make_inputs(dtype, device, num_tokens=3, num_columns=256, group_size=128, num_rows=21, origin=origin)
    inputs["x"] += 4
    tolerance = OP.tolerances[dtype]
    torch.testing.assert_close(
        int_linear(**inputs).cpu().double(), naive(inputs), atol=tolerance.atol, rtol=tolerance.rtol
    )


def every_byte() -> tuple[Tensor, Tensor]:
    """Codes [16, 128] and their words: each of the 256 at each place of a word, in both halves of its pairs."""
    codes = 16 * torch.arange(16)[:, None] + torch.arange(128) % 32 // 2
    return codes, to_chunks(pack_words(codes, 8), 8)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(
    ("tiles", "num_groups"), [(ONE, 1), (FEW, 1), (MANY, 1), (FEW, 2), (MANY, 4), (REGISTERS, 1), (SHARED, 1)], ids=str
)
def test_every_code_of_8_bits_is_exact(tiles: Tiles, num_groups: int, dtype: torch.dtype, device: torch.device) -> None:
    """A token that is a single 1 reads a column of the weight."""
    codes, words = every_byte()
    x = torch.eye(128, dtype=dtype, device=device)
    scales = 2.0 ** -torch.arange(16.0 * num_groups).view(16, num_groups)
    output = torch.empty(128, 16, device=device)
    int_linear(x, words.to(device), scales.to(device), 8, output=output, tiles=tiles)
    expected = (codes - 128) * scales.double().repeat_interleave(128 // num_groups, dim=1)
    assert torch.equal(output.cpu().double(), expected.t())


@triton.jit
def _bytes_kernel(pairs_ptr, scaling_ptr, low_ptr, high_ptr, magic, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    word = tl.arange(0, SIZE)
    low, high = tl.load(low_ptr + word), tl.load(high_ptr + word)
    for place in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(pairs_ptr + place * SIZE + word, byte_pairs(low, high, magic, place, DTYPE))
    scaling = signed_scaling(DTYPE)
    for index in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(scaling_ptr + index, scaling[index])


@pytest.mark.parametrize(("dtype", "of_kernel"), [(torch.bfloat16, tl.bfloat16), (torch.float16, tl.float16)], ids=str)
def test_bits_and_scaling_of_signed_codes(dtype: torch.dtype, of_kernel: tl.dtype, device: torch.device) -> None:
    """What makes them exact, held without arithmetic of 16 bits, which the interpreter has for float16 alone."""
    codes, words = every_byte()
    low, high = (plane.contiguous().to(device) for plane in words.chunk(2, dim=1))
    pairs = torch.empty(4, 16, 16, dtype=torch.int32, device=device)
    scaling = torch.empty(3, device=device)
    sizes: dict[str, Any] = {"SIZE": low.numel(), "DTYPE": of_kernel}
    _bytes_kernel[(1,)](pairs, scaling, low, high, MAGIC[dtype], **sizes)
    factor, addend, left_out = scaling.tolist()
    numbers = pairs.cpu().view(dtype).view(4, 16, 32).transpose(0, 1).flatten(1).double()
    signed = numbers * factor + addend
    assert torch.equal(signed * left_out, (codes - 128).double())
    assert torch.equal(signed.to(dtype).double(), signed)


@pytest.mark.parametrize("num_tokens", [1, 17, MAX_TOKENS + 1])
def test_writes_float32_where_it_is_told(num_tokens: int, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float16, device, num_tokens=num_tokens, num_columns=96, group_size=32, num_rows=21)
    output = torch.empty(num_tokens, 21, device=device)
    assert int_linear(**inputs, output=output) is output
    # Up to the number of tokens where the weight itself is rounded, nothing is.
    tolerance = 2e-5 if num_tokens <= MAX_TOKENS else 5e-3
    torch.testing.assert_close(output.cpu().double(), naive(inputs), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 17, 33])
def test_defaults_in_every_dtype(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = OP.make_inputs(dtype, device, num_tokens=num_tokens, num_columns=128, group_size=128)
    tolerance = OP.tolerances[dtype]
    torch.testing.assert_close(
        int_linear(**inputs).cpu().double(), naive(inputs), atol=tolerance.atol, rtol=tolerance.rtol
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bits": 3}, "bits is 3; allowed are 4, 8"),
        ({"x": torch.zeros(2, 40)}, "3 groups, of which 40 columns"),
        ({"words": torch.zeros(77, 23, dtype=torch.int32)}, "words"),
        ({"scales": torch.zeros(77, 4)}, "4 groups"),
        ({"zero_points": torch.zeros(77, 3, dtype=torch.int16)}, "both given"),
        ({"minimums": None, "zero_points": torch.zeros(77, 3, dtype=torch.uint8)}, "zero_points is uint8"),
        ({"minimums": torch.zeros(77, 3)}, "minimums is float32"),
        ({"minimums": torch.zeros(77, 2).half()}, "minimums has 2 groups"),
        ({"bias": torch.zeros(76)}, "bias"),
        ({"residual": torch.zeros(5, 76)}, "residual"),
        ({"tiles": Tiles(32, 64, 128, 8, 1)}, "block_n is a multiple of 16 rows of 8 warps"),
        ({"output": torch.zeros(5, 77).half()}, "output is float16; expected float32"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], named: str, device: torch.device) -> None:
    changes = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=named):
        int_linear(**(OP.make_inputs(torch.float32, device) | changes))


def test_nothing_to_do(device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    assert int_linear(**(inputs | {"x": inputs["x"][:0]})).shape == (0, 77)


def test_more_tokens_than_the_kernel_takes(device: torch.device) -> None:
    """They go through the dequantized weight."""
    inputs = OP.make_inputs(torch.float32, device, num_tokens=MAX_TOKENS + 1, num_columns=96, group_size=32, num_rows=5)
    torch.testing.assert_close(int_linear(**inputs).cpu().double(), naive(inputs), atol=2e-5, rtol=1e-5)


def test_the_residual_may_be_written_over(device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_tokens=2, residual=True)
    expected = naive(inputs)
    assert int_linear(**inputs, output=inputs["residual"]) is inputs["residual"]
    torch.testing.assert_close(inputs["residual"].cpu().double(), expected, atol=2e-5, rtol=1e-5)
