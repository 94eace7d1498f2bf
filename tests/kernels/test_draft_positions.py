from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

OP = REGISTRY["draft_positions"]
IMPLEMENTATIONS = ["reference", "launch"]
ARRAYS = ("starts", "counts", "last_indices", "seq_lens", "block_tables")


def call(which: str, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return getattr(OP, which)(**inputs)


def naive(inputs: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """A request after the other: its text as long as it was before the round, the tokens accepted, and so many more."""
    starts, counts, last_indices, seq_lens, tables = (inputs[name].tolist() for name in ARRAYS)
    num_reqs, num_passes, block_size = len(starts), inputs["num_passes"], inputs["block_size"]
    lengths = [[0] * num_reqs for _ in range(num_passes)]
    slots = [[[0] * num_reqs for _ in range(num_passes)] for _ in tables]
    for r in range(num_reqs):
        if seq_lens[r] == 0:
            continue
        num_known = seq_lens[r] - counts[r]  # up to the token that the round began with
        num_accepted = last_indices[r] - starts[r]
        for index in range(num_passes):
            # The token that came of the round itself is the first.
            length = lengths[index][r] = min(num_known + num_accepted + 1 + index, inputs["max_model_len"])
            block, offset = divmod(length - 1, block_size)
            for group, table in enumerate(tables):
                slots[group][index][r] = table[r][block] * block_size + offset
    return lengths, [[max(length - 1, 0) for length in row] for row in lengths], slots


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("num_reqs", "num_drafts", "num_groups", "block_size"), [(1, 1, 1, 16), (7, 5, 2, 24), (32, 8, 1, 3), (2, 0, 3, 1)]
)
def test_tokens_follow_what_was_accepted(
    num_reqs: int, num_drafts: int, num_groups: int, block_size: int, which: str, device: torch.device
) -> None:
    """The last request is padding; others are near the end of their tables, behind which nothing is."""
    sizes = {"num_reqs": num_reqs, "num_drafts": num_drafts, "num_groups": num_groups, "block_size": block_size}
    inputs = OP.make_inputs(torch.float32, device, **sizes, max_num_blocks=16)
    inputs["max_model_len"] = 16 * block_size - (block_size - 1) // 2
    inputs["seq_lens"][0] = inputs["max_model_len"] - 1
    before = {name: inputs[name].clone() for name in ARRAYS}
    seq_lens, positions, slot_mappings = call(which, inputs)
    assert (seq_lens.dtype, positions.dtype, slot_mappings.dtype) == (torch.int32, torch.int64, torch.int64)
    assert (seq_lens.tolist(), positions.tolist(), slot_mappings.tolist()) == naive(inputs)
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_slots_past_two_to_the_31(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    inputs["block_tables"] += 2**28
    expected = naive(inputs)[2]
    assert max(map(max, expected[1])) > 2**32
    assert call(which, inputs)[2].tolist() == expected


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_takes_parts_of_wider_tables(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    expected = naive(inputs)
    wide = torch.full((2, 9, 11), -5, dtype=torch.int32, device=device)
    wide[:, 1:8, 2:7] = inputs["block_tables"]
    outputs = call(which, inputs | {"block_tables": wide[:, 1:8, 2:7]})
    assert tuple(it.tolist() for it in outputs) == expected


def test_kernel_writes_nothing_but_its_outputs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_reqs=33, num_drafts=4)  # two programs, the second half empty
    expected = naive(inputs)
    bands = GuardBands(value=77)
    monkeypatch.setattr(torch, "empty", bands.empty)
    outputs = call("launch", inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert tuple(it.tolist() for it in outputs) == expected


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_requests(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device) | {name: torch.empty(0).long().to(device) for name in ARRAYS[:3]}
    inputs |= {"seq_lens": torch.empty(0).int().to(device), "block_tables": torch.empty(2, 0, 5).int().to(device)}
    assert [it.shape for it in call(which, inputs)] == [(4, 0), (4, 0), (2, 4, 0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": torch.zeros(2).long()}, "seq_lens is int64; expected int32"),
        ({"starts": torch.zeros(2).int()}, "starts is int32; expected int64"),
        ({"counts": torch.zeros(3).long()}, r"counts has shape \[3\]; expected \[2\]"),
        ({"last_indices": torch.zeros(2, device="meta").long()}, "last_indices is on meta; expected cpu"),
        ({"block_tables": torch.zeros(2, 4).int()}, r"block_tables has shape \[2, 4\]; expected \[any, 2, any\]"),
        ({"block_tables": torch.zeros(1, 2, 4).long()}, "block_tables is int64; expected int32"),
        ({"block_tables": torch.zeros(0, 2, 4).int()}, "num_groups is 0; allowed are 1 and more"),
        ({"num_passes": 0}, "num_passes is 0; allowed are 1 and more"),
        ({"block_size": 0}, "block_size is 0; allowed are 1 and more"),
        ({"max_model_len": 65}, "max_model_len is 65; block_tables hold 64 tokens of a request"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = {name: torch.zeros(2).long() for name in ARRAYS[:3]}
    inputs |= {"seq_lens": torch.zeros(2).int(), "block_tables": torch.zeros(1, 2, 4).int()}
    inputs |= {"num_passes": 2, "block_size": 16, "max_model_len": 64}
    with pytest.raises(ValueError, match=message):
        OP.launch(**(inputs | change))
