from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.registry import REGISTRY
from tests.kernels.oracle import GuardBands

OP = REGISTRY["record_tokens"]
IMPLEMENTATIONS = ["reference", "launch"]


def call(which: str, inputs: dict[str, Any]) -> Tensor:
    return getattr(OP, which)(**inputs)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("num_sampled", [1, 7, 128, 300])
def test_each_token_becomes_its_rows_last_one(num_sampled: int, grows: bool, which: str, device: torch.device) -> None:
    """Rows that are not named keep theirs; a length of 0 stays 0."""
    num_rows = num_sampled + 5
    inputs = OP.make_inputs(torch.float32, device, num_sampled=num_sampled, num_rows=num_rows, grows=grows)
    rows, token_ids = inputs["rows"].tolist(), inputs["token_ids"].tolist()
    bands = GuardBands(value=77)
    for name in ("sampled_token_ids", *(("seq_lens",) if grows else ())):
        inputs[name] = bands.wrap(inputs[name])
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    outcomes = call(which, inputs)
    assert outcomes.dtype == torch.int64
    wanted = [token if finite else -1 for token, finite in zip(token_ids, inputs["finite"].tolist(), strict=True)]
    assert outcomes.tolist() == wanted
    latest = before["sampled_token_ids"].tolist()
    for row, token_id in zip(rows, token_ids, strict=True):
        latest[row] = token_id
    assert inputs["sampled_token_ids"].tolist() == latest
    if grows:
        lengths = before["seq_lens"].tolist()
        assert inputs["seq_lens"].tolist() == [length + 1 if length else 0 for length in lengths]
    bands.assert_untouched()
    assert all(torch.equal(inputs[name], before[name]) for name in ("token_ids", "finite", "rows"))


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_a_token_without_usable_logits_is_kept_but_not_told(which: str, device: torch.device) -> None:
    """The next step may be under way already: what it reads must be some id of the vocabulary."""
    inputs = OP.make_inputs(torch.float32, device)
    inputs["finite"].zero_()
    assert call(which, inputs).tolist() == [-1] * 7
    assert torch.equal(inputs["sampled_token_ids"][inputs["rows"]], inputs["token_ids"])


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_padding_shares_a_row(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device)
    rows = inputs["rows"].tolist()
    inputs["rows"][3:] = free = next(row for row in range(9) if row not in rows)
    call(which, inputs)
    assert inputs["sampled_token_ids"][rows[:3]].tolist() == inputs["token_ids"][:3].tolist()
    assert int(inputs["sampled_token_ids"][free]) in inputs["token_ids"][3:].tolist()


def test_kernel_writes_nothing_but_its_output(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_sampled=130, num_rows=131)
    expected = OP.reference(**{n: v.clone() for n, v in inputs.items()})
    bands = GuardBands(value=77)
    monkeypatch.setattr(torch, "empty", bands.empty)
    outcomes = call("launch", inputs)
    monkeypatch.undo()
    bands.assert_untouched()
    assert isinstance(expected, Tensor)
    assert torch.equal(outcomes, expected)


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_of_no_tokens(which: str, device: torch.device) -> None:
    inputs = OP.make_inputs(torch.float32, device, num_sampled=0)
    before = inputs["sampled_token_ids"].clone()
    outcomes = call(which, inputs)
    assert (outcomes.shape, outcomes.dtype) == ((0,), torch.int64)
    assert torch.equal(inputs["sampled_token_ids"], before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.zeros(2).int()}, "token_ids is int32; expected int64"),
        ({"token_ids": torch.zeros(1, 2).long()}, r"token_ids has shape \[1, 2\]; expected \[2\]"),
        ({"finite": torch.zeros(2).int()}, "finite is int32; expected bool"),
        ({"finite": torch.zeros(3).bool()}, r"finite has shape \[3\]; expected \[2\]"),
        ({"rows": torch.zeros(3).long()}, r"rows has shape \[3\]; expected \[2\]"),
        ({"rows": torch.zeros(2, device="meta").long()}, "rows is on meta; expected cpu"),
        ({"sampled_token_ids": torch.zeros(4).int()}, "sampled_token_ids is int32; expected int64"),
        ({"sampled_token_ids": torch.zeros(8).long()[::2]}, "sampled_token_ids has stride 2"),
        ({"seq_lens": torch.zeros(2).long()}, "seq_lens is int64; expected int32"),
        ({"seq_lens": torch.zeros(3).int()}, r"seq_lens has shape \[3\]; expected \[2\]"),
    ],
)
def test_launcher_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    inputs = {
        "token_ids": torch.zeros(2).long(),
        "finite": torch.ones(2).bool(),
        "rows": torch.arange(2),
        "sampled_token_ids": torch.zeros(4).long(),
    }
    with pytest.raises(ValueError, match=message):
        OP.launch(**(inputs | change))
