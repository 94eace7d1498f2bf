"""Where the tokens of a speculative round stand: the packed tokens of a step, and the passes that draft them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.reference.round_positions import RoundPositions
from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

OP = REGISTRY["round_positions"]
IMPLEMENTATIONS = ["reference", "launch"]


def naive(
    counts: list[int], num_computed: list[int], tables: list[list[list[int]]], width: int, block_size: int
) -> dict[str, Any]:
    num_rows = len(counts)
    tokens: list[tuple[int, int]] = []
    starts, places, query_start_loc, seq_lens = [], [], [0], []
    for row, (count, computed) in enumerate(zip(counts, num_computed, strict=True)):
        is_request = computed >= 0
        starts.append(len(tokens) if is_request else 0)
        places.append([starts[-1] + min(column, count) if is_request else 0 for column in range(width)])
        tokens += [(row, column) for column in range(count + 1)] if is_request else []
        query_start_loc.append(len(tokens))
        seq_lens.append(computed + count + 1 if is_request else 0)

    def position(row: int, column: int) -> int:
        return num_computed[row] + column

    def slot(table: list[list[int]], row: int, column: int) -> int:
        at = position(row, column)
        return table[row][at // block_size] * block_size + at % block_size

    padding = [0] * (num_rows * width - len(tokens))
    passes = [[(row, column) for row in range(num_rows)] for column in range(width)]
    return {
        "starts": starts,
        "sources": [row * width + column for row, column in tokens] + padding,
        "places": places,
        "positions": [position(*token) for token in tokens] + padding,
        "slot_mappings": [[slot(table, *token) for token in tokens] + padding for table in tables],
        "pass_positions": [[position(*it) if it in tokens else 0 for it in each] for each in passes],
        "pass_slot_mappings": [
            [[slot(table, *it) if it in tokens else 0 for it in each] for each in passes] for table in tables
        ],
        "pass_seq_lens": [[position(*it) + 1 if it in tokens else 0 for it in each] for each in passes],
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
    }


def lists(found: RoundPositions) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in found._asdict().items()}


def expected(inputs: dict[str, Any]) -> dict[str, Any]:
    parts = (inputs[name].tolist() for name in ("counts", "num_computed", "block_tables"))
    return naive(*parts, inputs["width"], inputs["block_size"])


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (1, 6), (5, 4), (32, 9)])
def test_against_a_loop(
    num_rows: int, width: int, block_size: int, num_groups: int, which: str, device: torch.device
) -> None:
    sizes = {"num_rows": num_rows, "width": width, "block_size": block_size, "num_groups": num_groups}
    for seed in range(3):
        inputs = OP.make_inputs(torch.float32, device, seed, **sizes, max_num_blocks=12)
        before = {name: inputs[name].clone() for name in ("counts", "num_computed", "block_tables")}
        found = getattr(OP, which)(**inputs)
        assert lists(found) == expected(inputs)
        dtypes = {name: tensor.dtype for name, tensor in found._asdict().items()}
        int32 = {"pass_seq_lens", "query_start_loc", "seq_lens"}
        assert dtypes == {name: torch.int32 if name in int32 else torch.int64 for name in dtypes}
        assert all(torch.equal(inputs[name], value) for name, value in before.items())


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_rows_without_requests_alone_and_between_others(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    for computed in ([-1] * 5, [-1, 7, -1, 0, -1], [3, -1, -1, -1, -1]):
        inputs["num_computed"] = torch.tensor(computed, device=device)
        inputs["counts"] = torch.tensor([0 if each < 0 else 2 for each in computed], device=device)
        assert lists(getattr(OP, which)(**inputs)) == expected(inputs)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_slots_past_two_to_the_31_in_rows_of_a_wider_table(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_groups=2)
    wide = torch.full((2, 5, 9), -5, dtype=torch.int32, device=device)
    wide[:, :, 2:8] = inputs["block_tables"] + 2**28
    inputs["block_tables"] = wide[:, :, 2:8]
    found = lists(getattr(OP, which)(**inputs))
    assert found == expected(inputs)
    assert max(found["slot_mappings"][0]) > 2**32


def test_the_kernel_writes_all_of_its_outputs_and_nothing_else(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_rows=7, width=5, num_groups=2)
    bands = GuardBands(value=77)
    monkeypatch.setattr(torch, "empty", bands.empty)
    found = OP.launch(**inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert lists(found) == expected(inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width is 0; allowed are 1 and more"),
        ({"block_size": 0}, "block_size is 0; allowed are 1 and more"),
        ({"counts": torch.zeros(0, dtype=torch.int64)}, "num_computed"),
    ],
)
def test_refused(changes: dict[str, Any], message: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=message):
        OP.launch(**OP.make_inputs(torch.float32, device) | changes)
