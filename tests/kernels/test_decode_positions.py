from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

OP = REGISTRY["decode_positions"]
IMPLEMENTATIONS = ["reference", "launch"]


def call(which: str, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return getattr(OP, which)(**inputs)


def naive(seq_lens: list[int], table: list[list[int]], block_size: int) -> tuple[list[int], list[int]]:
    positions = [max(length - 1, 0) for length in seq_lens]
    slots = [
        row[position // block_size] * block_size + position % block_size if length else 0
        for row, position, length in zip(table, positions, seq_lens, strict=True)
    ]
    return positions, slots


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 256])
@pytest.mark.parametrize("num_reqs", [1, 7, 128, 300])
def test_the_last_token_of_each_request(num_reqs: int, block_size: int, which: str, device: torch.device) -> None:
    """Lengths of 0, at the bounds of blocks and in between."""
    inputs = OP.make_inputs(torch.float32, device, num_reqs=num_reqs, block_size=block_size)
    edges = torch.tensor([0, 1, block_size, block_size + 1, 5 * block_size], dtype=torch.int32, device=device)
    inputs["seq_lens"][: len(edges)] = edges[:num_reqs]
    before = {name: inputs[name].clone() for name in ("seq_lens", "block_table")}
    expected = naive(inputs["seq_lens"].tolist(), inputs["block_table"].tolist(), block_size)
    positions, slots = call(which, inputs)
    assert (positions.dtype, slots.dtype) == (torch.int64, torch.int64)
    assert (positions.tolist(), slots.tolist()) == expected
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_slots_past_two_to_the_31(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    inputs["block_table"] += 2**28
    expected = naive(inputs["seq_lens"].tolist(), inputs["block_table"].tolist(), 16)
    assert max(expected[1]) > 2**32
    assert call(which, inputs)[1].tolist() == expected[1]


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_takes_rows_of_a_wider_table(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    expected = naive(inputs["seq_lens"].tolist(), inputs["block_table"].tolist(), 16)
    wide = torch.full((7, 9), -5, dtype=torch.int32, device=device)
    wide[:, 2:7] = inputs["block_table"]
    positions, slots = call(which, inputs | {"block_table": wide[:, 2:7]})
    assert (positions.tolist(), slots.tolist()) == expected


def test_kernel_writes_nothing_but_its_outputs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_reqs=130)
    expected = call("reference", inputs)
    bands = GuardBands(value=77)
    monkeypatch.setattr(torch, "empty", bands.empty)
    outputs = call("launch", inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_requests(which: str, device: torch.device) -> None:
    positions, slots = call(which, OP.make_inputs(torch.float32, device, num_reqs=0))
    assert (positions.shape, slots.shape) == ((0,), (0,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": torch.zeros(2).long()}, "seq_lens is int64; expected int32"),
        ({"seq_lens": torch.zeros(1, 2).int()}, r"seq_lens has shape \[1, 2\]; expected \[2\]"),
        ({"block_table": torch.zeros(3, 4).int()}, r"block_table has shape \[3, 4\]; expected \[2, any\]"),
        ({"block_table": torch.zeros(2, 4).long()}, "block_table is int64; expected int32"),
        ({"block_table": torch.zeros(4, 2).int().t()}, "block_table has stride 2 in its last dimension; expected 1"),
        ({"block_table": torch.zeros(2, 4, device="meta").int()}, "block_table is on meta; expected cpu"),
        ({"block_size": 0}, "block_size is 0; allowed are 1 and more"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {"seq_lens": torch.zeros(2).int(), "block_table": torch.zeros(2, 4).int(), "block_size": 16}
    with pytest.raises(ValueError, match=message):
        OP.launch(**(inputs | change))
