from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backend.quantization.nf4 import NF4, KernelNF4Weight
from kernels.ops.nf4_levels import LEVEL_SCALE, byte_tables, level_table, table_words
from kernels.ops.nf4_linear import MAX_TOKENS, nf4_linear
from kernels.ops.projection import Tiles
from kernels.reference.int_words import pack_words
from kernels.reference.nf4_linear import NF4_LEVELS
from kernels.reference.nf4_words import STORED_CODES, from_nf4_chunks, to_nf4_chunks
from kernels.registry import REGISTRY
from tests.kernels.oracle import KERNEL_DTYPES

OP = REGISTRY["nf4_linear"]
CPU = torch.device("cpu")
ONE = Tiles(1, 16, 128, 2, 1)
FEW = Tiles(8, 32, 128, 1, 1)
SIXTEEN = Tiles(16, 16, 128, 4, 1)
WIDE = Tiles(32, 64, 128, 4, 2)
HALVES = [torch.bfloat16, torch.float16]


def stored_code(words: list[int], column: int) -> int:
    """A code at a time: word w of a chunk holds columns 32 p + 2 w + h at bits 8 p + 4 h."""
    chunk, inside = divmod(column, 128)
    place, pair = divmod(inside, 32)
    return words[chunk * 16 + pair // 2] % 2**32 >> (8 * place + 4 * (pair % 2)) & 15


def naive(inputs: dict[str, Any]) -> Tensor:
    """In float64."""
    words = inputs["words"].tolist()
    codes, steps, means = (inputs[name].cpu().double() for name in ("codes", "steps", "means"))
    magnitudes = codes * steps + means
    num_columns = inputs["x"].shape[1]
    block_size = num_columns // codes.shape[1]
    weight = torch.zeros(len(words), num_columns, dtype=torch.float64)
    for row in range(len(words)):
        for column in range(num_columns):
            level = NF4_LEVELS[STORED_CODES.index(stored_code(words[row], column))]
            weight[row, column] = level * magnitudes[row, column // block_size]
    y = inputs["x"].cpu().double() @ weight.t()
    for more in ("bias", "residual"):
        y = y if inputs[more] is None else y + inputs[more].cpu().double()
    return y


@pytest.mark.parametrize("num_columns", [72, 96, 256])
def test_chunks_deal_columns_out_over_their_words(num_columns: int) -> None:
    levels = torch.randint(0, 16, (3, num_columns), generator=torch.Generator().manual_seed(0))
    words = pack_words(levels, 4)
    chunks = to_nf4_chunks(words, num_columns)
    assert chunks.shape == (3, -(-num_columns // 128) * 16)
    stored = [[stored_code(row, column) for column in range(num_columns)] for row in chunks.tolist()]
    assert stored == [[STORED_CODES[level] for level in row] for row in levels.tolist()]
    assert torch.equal(from_nf4_chunks(chunks, num_columns), words)


def prmt(first: int, second: int, selector: int) -> int:
    """What PTX says of it: four bytes out of eight, each by three bits; with the fourth, the byte's top bit eight times."""
    source = (first | second << 32).to_bytes(8, "little")
    chosen = [source[selector >> 4 * place & 7] for place in range(4)]
    signs = [selector >> 4 * place & 8 for place in range(4)]
    values = [(0xFF if byte & 0x80 else 0) if sign else byte for byte, sign in zip(chosen, signs, strict=True)]
    return int.from_bytes(bytes(values), "little")


@pytest.mark.parametrize("dtype", HALVES)
def test_two_tables_of_bytes_give_every_level(dtype: torch.dtype) -> None:
    low, flipped_low, high, flipped_high = byte_tables(dtype)
    found = {}
    for code in range(16):
        selector = code | 5 << 4 | 11 << 8 | 2 << 12
        lower = prmt(*low, selector) ^ prmt(*flipped_low, selector ^ 0x8888)
        upper = prmt(*high, selector) ^ prmt(*flipped_high, selector ^ 0x8888)
        pair = prmt(lower, upper, 0x5140)
        found[code] = torch.tensor([pair & 0xFFFF, pair >> 16], dtype=torch.uint16).view(dtype)
    levels = torch.tensor(NF4_LEVELS)
    for level, code in enumerate(STORED_CODES):
        expected = (levels[[level, STORED_CODES.index(5)]] * LEVEL_SCALE[dtype]).to(dtype)
        assert torch.equal(found[code], expected)
    assert sorted(STORED_CODES) == list(range(16))


def test_tables_as_a_kernel_takes_them() -> None:
    for dtype in HALVES:
        words = table_words(dtype, CPU)
        assert words.shape == (8, 32)
        assert (words.view(torch.uint8).view(8, 32, 4) == words.view(torch.uint8).view(8, 32, 4)[:, :1]).all()
        flat = [word for table in byte_tables(dtype) for word in table]
        assert [word % 2**32 for word in words[:, 0].tolist()] == flat
    assert level_table(torch.float32, CPU).tolist() == [NF4_LEVELS[STORED_CODES.index(code)] for code in range(16)]


STORED = ((192, 32), (320, 64), (96, 96), (256, 128), (72, 72), (1024, 64))  # columns, block size
BATCHES = ((1, ONE), (9, FEW), (11, SIXTEEN), (17, WIDE))


@pytest.mark.parametrize(
    ("num_tokens", "tiles", "num_columns", "block_size"),
    [(*batch, *stored) for batch in BATCHES for stored in STORED],
    ids=str,
)
def test_every_way_of_storing(
    num_tokens: int, tiles: Tiles, num_columns: int, block_size: int, device: torch.device
) -> None:
    """Neither rows, tokens nor columns are a multiple of any tile, but for 1,024 columns, which several programs share."""
    sizes = {"num_columns": num_columns, "block_size": block_size, "num_rows": 19, "num_tokens": num_tokens}
    inputs = OP.make_inputs(torch.float32, device, bias=True, residual=True, **sizes)
    expected = naive(inputs).float()
    for output in (nf4_linear(**inputs, tiles=tiles), OP.reference(**inputs)):
        assert isinstance(output, Tensor)
        torch.testing.assert_close(output.cpu(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 17])
def test_defaults_in_every_dtype(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = OP.make_inputs(dtype, device, num_tokens=num_tokens, num_rows=33)
    tolerance = OP.tolerances[dtype]
    torch.testing.assert_close(
        nf4_linear(**inputs).cpu().double(), naive(inputs), atol=tolerance.atol, rtol=tolerance.rtol
    )


def test_more_tokens_than_the_kernel_takes(device: torch.device) -> None:
    """They go through the dequantized weight."""
    sizes = {"num_tokens": MAX_TOKENS + 1, "num_columns": 160, "block_size": 32, "num_rows": 5}
    inputs = OP.make_inputs(torch.float32, device, bias=True, residual=True, **sizes)
    expected = naive(inputs)
    assert nf4_linear(**inputs, output=inputs["residual"]) is inputs["residual"]
    torch.testing.assert_close(inputs["residual"].cpu().double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [2, 17])
def test_the_residual_may_be_written_over(num_tokens: int, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_tokens=num_tokens, num_rows=33, residual=True)
    expected = naive(inputs)
    assert nf4_linear(**inputs, output=inputs["residual"]) is inputs["residual"]
    torch.testing.assert_close(inputs["residual"].cpu().double(), expected, atol=2e-5, rtol=1e-5)


def test_nothing_to_do(device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    assert nf4_linear(**(inputs | {"x": inputs["x"][:0]})).shape == (0, 77)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.zeros(2, 40)}, "3 blocks, of which 40 columns"),
        ({"words": torch.zeros(77, 31, dtype=torch.int32)}, "words has shape"),
        ({"codes": torch.zeros(77, 3)}, "codes is float32"),
        ({"codes": torch.zeros(77, 4, dtype=torch.int8)}, "4 blocks, of which 192 columns are no multiples of 32"),
        ({"steps": torch.zeros(77, 1)}, "steps is float32"),
        ({"means": torch.zeros(77, 2).bfloat16()}, "means has shape"),
        ({"bias": torch.zeros(76)}, "bias"),
        ({"residual": torch.zeros(5, 76)}, "residual"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], named: str, device: torch.device) -> None:
    changes = {name: value.to(device) for name, value in changes.items()}
    with pytest.raises(ValueError, match=named):
        nf4_linear(**(OP.make_inputs(torch.float32, device) | changes))


@pytest.mark.parametrize(("num_columns", "block_size"), [(128, 64), (192, 32), (72, -1)])
def test_a_layers_weight(num_columns: int, block_size: int, device: torch.device) -> None:
    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))

    packed = NF4(block_size).quantize(values(48, num_columns) * 0.05)
    on_device = packed.to(str(device))
    prepared = on_device.prepare() if device.type == "cuda" else KernelNF4Weight.of(on_device)
    assert isinstance(prepared, KernelNF4Weight)
    assert (packed.emulated, prepared.emulated) == (True, False)
    assert prepared.shape == packed.shape
    # Words fill chunks of 128 columns.
    assert prepared.nbytes - packed.nbytes == 48 * (-num_columns % 128) // 2
    assert torch.equal(prepared.dequantize().cpu(), packed.dequantize())
    x, bias, residual = values(5, num_columns), values(48), values(5, 48)
    expected = packed.linear(x, bias)
    torch.testing.assert_close(prepared.linear(x.to(device), bias.to(device)).cpu(), expected, atol=2e-5, rtol=1e-5)
    added = residual.to(device, copy=True)
    prepared.add_to(added, x.to(device), bias.to(device))
    torch.testing.assert_close(added.cpu(), residual + expected, atol=2e-5, rtol=1e-5)


@pytest.mark.gpu
def test_blocks_that_the_kernel_does_not_take_stay_emulated() -> None:
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    assert NF4(32).quantize(weight).to("cuda").prepare().emulated is False
    odd = NF4(48).quantize(weight).to("cuda")
    assert odd.prepare() is odd
