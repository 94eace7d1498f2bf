"""`gather_round` and `settle_round`: what goes into a round's step, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

GATHER, SETTLE = REGISTRY["gather_round"], REGISTRY["settle_round"]
IMPLEMENTATIONS = ["reference", "launch"]
SIZES = [(1, 1), (4, 3), (7, 5), (32, 8), (150, 1)]  # rows, drafts of each


def call(op: Any, which: str, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return getattr(op, which)(**inputs)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize(("num_rows", "k"), SIZES)
def test_the_step_has_each_rows_last_token_and_its_drafts(
    num_rows: int, k: int, which: str, device: torch.device
) -> None:
    inputs = GATHER.make_inputs(torch.float32, device, num_rows=num_rows, k=k, num_batch_rows=num_rows + 3)
    bands = GuardBands(value=77)
    inputs = {name: bands.wrap(value) for name, value in inputs.items()}
    wide = torch.full((num_rows + 3, k + 2), -5, device=device)  # drafts shorter than the longest
    wide[:, :k] = inputs["drafts"]
    before = {name: value.clone() for name, value in inputs.items()}
    token_ids, draft_token_ids = call(GATHER, which, inputs | {"drafts": wide[:, :k]})
    last, drafts = inputs["last_token_ids"].tolist(), inputs["drafts"].tolist()
    matrix = [[last[row], *drafts[row]] for row in inputs["rows"].tolist()]
    places = [divmod(place, k + 1) for place in inputs["sources"].tolist()]
    assert (token_ids.dtype, draft_token_ids.dtype) == (torch.int64, torch.int64)
    assert token_ids.tolist() == [matrix[row][column] for row, column in places]
    assert draft_token_ids.tolist() == [row[1:] for row in matrix]
    bands.assert_untouched()
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize(("num_rows", "k"), SIZES)
def test_a_round_leaves_its_last_tokens_and_what_follows(
    num_rows: int, k: int, which: str, device: torch.device
) -> None:
    """Rows that are not named keep theirs, and a token without usable logits is kept like any other."""
    inputs = SETTLE.make_inputs(torch.float32, device, num_rows=num_rows, k=k, num_batch_rows=num_rows + 3)
    bands = GuardBands(value=77)
    inputs = {name: bands.wrap(value) for name, value in inputs.items()}
    before = {name: value.clone() for name, value in inputs.items()}
    next_token_ids, last_indices = call(SETTLE, which, inputs)
    ids, latest = before["ids"].tolist(), before["last_token_ids"].tolist()
    accepted = [row[k + 1] for row in ids]
    for row, into, count in zip(ids, before["rows"].tolist(), accepted, strict=True):
        latest[into] = row[count]
    assert inputs["last_token_ids"].tolist() == latest
    lengths = before["num_computed"].tolist()
    moved = [length + count + 1 if length >= 0 else length for length, count in zip(lengths, accepted, strict=True)]
    assert inputs["num_computed"].tolist() == moved
    assert (next_token_ids.dtype, last_indices.dtype) == (torch.int64, torch.int64)
    places = [divmod(place, k + 1) for place in before["sources"].tolist()]
    assert next_token_ids.tolist() == [ids[row][j] if j <= accepted[row] else 0 for row, j in places]
    starts = before["starts"].tolist()
    assert last_indices.tolist() == [start + count for start, count in zip(starts, accepted, strict=True)]
    bands.assert_untouched()
    assert all(torch.equal(inputs[name], value) for name, value in before.items() if name not in SETTLE.mutates)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_padding_shares_a_row_and_is_in_nobodys_way(which: str, device: torch.device) -> None:
    """Two requests in a round of four: padding begins at the first token, whose own follower stays."""
    ids = torch.tensor([[5, 6, -1, 1, 1, 5, 9], [7, -1, -1, 0, 1, 8, 0], *[[3, -1, -1, 0, 1, 0, 0]] * 2], device=device)
    last_token_ids = torch.tensor([40, 41, 42, 43], device=device)
    inputs = {
        "ids": ids,
        "rows": torch.tensor([2, 0, 3, 3], device=device),
        "starts": torch.tensor([0, 3, 0, 0], device=device),
        "sources": torch.tensor([0, 1, 2, 3, 4] + [0] * 7, device=device),
        "last_token_ids": last_token_ids,
        "num_computed": (num_computed := torch.tensor([17, 0, -1, -1], device=device)),
    }
    next_token_ids, last_indices = call(SETTLE, which, inputs)
    assert next_token_ids.tolist()[:5] == [5, 6, 0, 7, 0]
    assert last_indices.tolist() == [1, 3, 0, 0]
    assert last_token_ids.tolist() == [7, 41, 6, 3]
    assert num_computed.tolist() == [19, 1, -1, -1]


@pytest.mark.parametrize("op", [GATHER, SETTLE], ids=lambda op: op.name)
def test_kernel_writes_nothing_but_its_outputs(op: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = op.make_inputs(torch.float32, device, num_rows=45, num_batch_rows=60)
    expected = op.reference(**{name: value.clone() for name, value in inputs.items()})
    bands = GuardBands(value=77)
    monkeypatch.setattr(torch, "empty", bands.empty)
    outputs = call(op, "launch", inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", [GATHER, SETTLE], ids=lambda op: op.name)
def test_of_no_rows(op: Any, which: str, device: torch.device) -> None:
    inputs = op.make_inputs(torch.float32, device, num_rows=0)
    before = inputs["last_token_ids"].clone()
    assert [it.numel() for it in call(op, which, inputs)] == [0, 0]
    assert torch.equal(inputs["last_token_ids"], before)


def test_bytes_are_what_goes_in_and_comes_out() -> None:
    inputs = GATHER.make_inputs(torch.float16, torch.device("cpu"), num_rows=4, k=3)
    # Numbers of rows, last tokens and drafts; drafts again; places in and tokens out.
    assert GATHER.bytes_moved(inputs) == 8 * (4 + 4 + 4 * 3 + 4 * 3 + 16 + 16)
    inputs = SETTLE.make_inputs(torch.float16, torch.device("cpu"), num_rows=4, k=3)
    # Tokens, how many were accepted, rows and starts; last tokens and where they are; lengths; places in and followers out.
    assert SETTLE.bytes_moved(inputs) == 8 * (4 * 4 + 4 + 4 + 4 + 4 + 4 + 2 * 4 + 16 + 16)


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        (GATHER, {"last_token_ids": torch.zeros(9).int()}, "last_token_ids is int32; expected int64"),
        (GATHER, {"drafts": torch.zeros(8, 3).long()}, r"drafts has shape \[8, 3\]; expected \[9, any\]"),
        (GATHER, {"drafts": torch.zeros(9, 0).long()}, "drafts has 0 columns; at least 1 is expected"),
        (GATHER, {"drafts": torch.zeros(9, 6).long()[:, ::2]}, "drafts has stride 2"),
        (GATHER, {"rows": torch.zeros(4).int()}, "rows is int32; expected int64"),
        (GATHER, {"sources": torch.zeros(4, device="meta").long()}, "sources is on meta; expected cpu"),
        (SETTLE, {"ids": torch.zeros(4, 9).int()}, "ids is int32; expected int64"),
        (SETTLE, {"ids": torch.zeros(4, 8).long()}, r"ids has 8 columns; 2 \* k \+ 3 are expected"),
        (SETTLE, {"ids": torch.zeros(4, 12).long()[:, :9]}, r"ids has strides \[12, 1\]; expected it contiguous"),
        (SETTLE, {"rows": torch.zeros(5).long()}, r"rows has shape \[5\]; expected \[4\]"),
        (SETTLE, {"starts": torch.zeros(4).int()}, "starts is int32; expected int64"),
        (SETTLE, {"sources": torch.zeros(4, 4).long()}, r"sources has shape \[4, 4\]; expected \[any\]"),
        (SETTLE, {"last_token_ids": torch.zeros(8).long()[::2]}, "last_token_ids has stride 2"),
    ],
)
def test_launchers_name_what_is_wrong(op: Any, change: dict[str, Any], message: str) -> None:
    inputs = op.make_inputs(torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        op.launch(**(inputs | change))
