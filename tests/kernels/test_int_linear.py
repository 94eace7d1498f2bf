from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops.int_linear import int_linear
from kernels.ops.projection import Tiles
from kernels.reference.int_words import codes_per_word, from_chunks, to_chunks, unpack_words
from kernels.registry import REGISTRY
from tests.kernels.oracle import KERNEL_DTYPES

OP = REGISTRY["int_linear"]
ONE = Tiles(1, 4, 64, 4, 2)
SEVERAL = Tiles(16, 32, 128, 4, 2)


def naive(inputs: dict[str, Any]) -> Tensor:
    """In float64, a code at a time: column k of a row is the (k mod 32 / bits)-th code of the chunk's (k mod bits)-th word."""
    bits, words, scales = inputs["bits"], inputs["words"].cpu(), inputs["scales"].cpu().double()
    num_rows, num_columns = len(words), inputs["x"].shape[1]
    weight = torch.zeros(num_rows, num_columns, dtype=torch.float64)
    group_size = num_columns // scales.shape[1]
    for row in range(num_rows):
        values = [value % 2**32 for value in words[row].tolist()]
        for column in range(num_columns):
            chunk, place = divmod(column, 32)
            code = values[chunk * bits + place % bits] >> (bits * (place // bits)) & (2**bits - 1)
            group = column // group_size
            if inputs["minimums"] is not None:
                weight[row, column] = code * scales[row, group] + inputs["minimums"].cpu().double()[row, group]
            else:
                zero = 2 ** (bits - 1) if inputs["zero_points"] is None else int(inputs["zero_points"][row, group])
                weight[row, column] = (code - zero) * scales[row, group]
    y = inputs["x"].cpu().double() @ weight.t()
    return y if inputs["bias"] is None else y + inputs["bias"].cpu().double()


@pytest.mark.parametrize("bits", [4, 8])
def test_chunks_deal_columns_out_over_their_words(bits: int) -> None:
    words = torch.randint(-(2**31), 2**31, (3, 2 * bits), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    codes = unpack_words(words, bits, 64)
    dealt = unpack_words(to_chunks(words, bits), bits, 64)
    per_word = codes_per_word(bits)
    for column in range(64):
        chunk, place = divmod(column, 32)
        assert torch.equal(dealt[:, 32 * chunk + place % bits * per_word + place // bits], codes[:, column])
    assert torch.equal(from_chunks(to_chunks(words, bits), bits), words)


@pytest.mark.parametrize("origin", ["none", "integer", "float"])
@pytest.mark.parametrize(("bits", "num_columns", "group_size"), [(4, 192, 32), (4, 96, 96), (8, 96, 32)])
@pytest.mark.parametrize(("num_tokens", "tiles"), [(1, ONE), (2, ONE), (3, SEVERAL), (17, SEVERAL)], ids=str)
def test_every_way_of_storing(
    num_tokens: int, tiles: Tiles, bits: int, num_columns: int, group_size: int, origin: str, device: torch.device
) -> None:
    """Neither rows, tokens nor columns are a multiple of any tile."""
    sizes = {"num_columns": num_columns, "group_size": group_size, "num_rows": 37, "num_tokens": num_tokens}
    inputs = OP.make_inputs(torch.float32, device, bits=bits, origin=origin, bias=True, **sizes)
    expected = naive(inputs).float()
    for output in (int_linear(**inputs, tiles=tiles), OP.reference(**inputs)):
        assert isinstance(output, Tensor)
        torch.testing.assert_close(output.cpu(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5])
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
        ({"x": torch.zeros(2, 40)}, "multiple of 32"),
        ({"words": torch.zeros(77, 23, dtype=torch.int32)}, "words"),
        ({"scales": torch.zeros(77, 4)}, "4 groups"),
        ({"zero_points": torch.zeros(77, 3, dtype=torch.uint8)}, "both given"),
        ({"minimums": torch.zeros(77, 3)}, "minimums is float32"),
        ({"bias": torch.zeros(76)}, "bias"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], named: str, device: torch.device) -> None:
    changes = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=named):
        int_linear(**(OP.make_inputs(torch.float32, device) | changes))


def test_nothing_to_do(device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    assert int_linear(**(inputs | {"x": inputs["x"][:0]})).shape == (0, 77)
